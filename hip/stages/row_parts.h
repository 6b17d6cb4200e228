// Stages whose tasks are parts of a row's context: rows have different lengths, so tasks are numbered row by row.
#pragma once
#include "platform/platform.h"

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
