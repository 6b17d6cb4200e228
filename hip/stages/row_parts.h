// Stages whose tasks are parts of a row's context: rows have different lengths, so tasks are numbered row by row.
#pragma once
#include "handoff/step.h"

// What this step itself writes of the sequence that a row belongs to. Neighbouring rows may be successive tokens of one
// sequence: then each reads what those before it have written. first[row]: the lowest of these positions, the row's own if it
// is alone.
struct Written {
  const u32 *first, *positions;
  const Pair* flags;  // [rows]: the row's entry of the layer is written

  DEVICE u32 first_of(int row) const { return load_constant(first + row); }
  DEVICE u32 count(int row) const { return load_constant(positions + row) - first_of(row) + 1; }
  // By one thread: this row's entry and those before it are there.
  DEVICE bool wait(Step& s, int row, u32 tag) const {
    bool ok = true;
    for (int of = row + 1 - (int)count(row); of <= row; ++of) ok = ok && s.wait_flag(flags + of, tag);
    return ok;
  }
};

struct RowPart {
  int row, part;
};

// parts(row): how many tasks a row has.
template <class Parts> DEVICE int count_parts(int rows, Parts parts) {
  int total = 0;
  for (int row = 0; row < rows; ++row) total += parts(row);
  return total;
}
template <class Parts> DEVICE RowPart find_part(int task, int rows, Parts parts) {
  int row = 0;
  for (; row + 1 < rows && task >= parts(row); ++row) task -= parts(row);
  return {row, task};
}
