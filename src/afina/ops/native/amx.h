// The CPU's matrix unit: eight tiles of sixteen rows of 64 bytes. A product of two bf16 tiles adds to an fp32 one:
// C[m][n] += sum over k of A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1], so B holds pairs of rows side by side.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

struct TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 take sums, 4 and 5 rows of A, 6 and 7 pairs of B; `first` and `second` rows of A are real.
static inline void shape_tiles(int first, int second) {
  TileShape shape;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) {
    shape.rows[i] = (uint8_t)(rows[i] > 0 ? rows[i] : 1);
    shape.bytes[i] = 64;
  }
  _tile_loadconfig(&shape);
}
