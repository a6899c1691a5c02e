// 32 rows of A times 32 columns of B, in bf16 with sums in fp32, by what the CPU has: its matrix unit (AMX), eight tiles
// of sixteen rows of 64 bytes, or products of pairs (AVX512-BF16). Both take B in the form that it is packed in:
//
//     C[m][n] += sum over k of A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1]
//
// so B holds pairs of rows side by side: for 32 of K a tile of 16 columns, and one of the other 16.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "numbers.h"

extern bool afina_tiles;  // whether the matrix unit is used; see ready.cpp

namespace {

const int PANEL = 32;
const int64_t TILE = 512;  // numbers of one packed tile

// Sums of ROWS rows of A, each `depth` numbers long in steps of `a_step`: 32 columns of them are held in registers.
template <int ROWS>
struct Sums {
  __m512 at[ROWS][2];

  inline void zero() {
    for (int m = 0; m < ROWS; m++) at[m][0] = at[m][1] = _mm512_setzero_ps();
  }
  inline void load(const float* from, int64_t step) {
    for (int m = 0; m < ROWS; m++)
      for (int n = 0; n < 2; n++) at[m][n] = _mm512_loadu_ps(from + m * step + 16 * n);
  }
  inline void store(float* to, int64_t step) const {
    for (int m = 0; m < ROWS; m++)
      for (int n = 0; n < 2; n++) _mm512_storeu_ps(to + m * step + 16 * n, at[m][n]);
  }
  inline void add(const bf16* a, int64_t a_step, const bf16* packed) {  // 32 of K
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++) {
      const __m512bh low = (__m512bh)_mm512_load_si512(packed + 32 * pair);
      const __m512bh high = (__m512bh)_mm512_load_si512(packed + TILE + 32 * pair);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++) {
        int both;
        memcpy(&both, a + m * a_step + 2 * pair, 4);
        const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
        at[m][0] = _mm512_dpbf16_ps(at[m][0], x, low);
        at[m][1] = _mm512_dpbf16_ps(at[m][1], x, high);
      }
    }
  }
};

#if defined(__AMX_BF16__)
struct TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
#endif

// Before the first product of a thread and whenever the rows change: of A, `first` of 16 and `second` of 16 are real.
// Tiles 0 to 3 take sums, 4 and 5 rows of A, 6 and 7 pairs of B.
inline void shape_tiles(int first, int second) {
#if defined(__AMX_BF16__)
  if (!afina_tiles) return;
  TileShape shape;
  const int rows[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) {
    shape.rows[i] = (uint8_t)(rows[i] > 0 ? rows[i] : 1);
    shape.bytes[i] = 64;
  }
  _tile_loadconfig(&shape);
#endif
}

// After the last product of a thread.
inline void release_tiles() {
#if defined(__AMX_BF16__)
  if (afina_tiles) _tile_release();
#endif
}

// to += A B for 32 whole rows of A, 32 numbers long and next to one another.
inline void add_product(const bf16* a, const bf16* packed, float* to, int64_t step) {
#if defined(__AMX_BF16__)
  if (afina_tiles) {
    const int64_t bytes = step * 4;
    _tile_loadd(0, to, bytes);
    _tile_loadd(1, to + 16, bytes);
    _tile_loadd(2, to + 16 * step, bytes);
    _tile_loadd(3, to + 16 * step + 16, bytes);
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + 16 * 32, 64);
    _tile_loadd(6, packed, 64);
    _tile_loadd(7, packed + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + 16, bytes);
    _tile_stored(2, to + 16 * step, bytes);
    _tile_stored(3, to + 16 * step + 16, bytes);
    return;
  }
#endif
  for (int64_t m = 0; m < 32; m += 8) {
    Sums<8> sums;
    sums.load(to + m * step, step);
    sums.add(a + m * 32, 32, packed);
    sums.store(to + m * step, step);
  }
}

}  // namespace
