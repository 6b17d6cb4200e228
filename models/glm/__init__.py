"""GLM-5, 5.1 and 5.2 (`glm_moe_dsa`): MLA, an indexer whose choice layers may share, a sigmoid mixture of experts."""
