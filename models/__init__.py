"""Model families: one folder each, with the same file names in every one; `common` holds what they share."""
