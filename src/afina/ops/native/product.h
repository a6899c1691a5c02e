// A product of bf16 matrices: how B is packed, and up to 32 rows of A times a panel of 32 columns of B.
#pragma once
#include <cstdlib>

#include "tiles.h"
#include "transpose.h"

struct Part {
  const bf16* a;     // (M, K) row by row, `a_step` numbers apart; columns from k on are not read
  int64_t a_step;
  int64_t k;         // columns of A, a multiple of 32
  const void* b;     // `by_rows`: (K, N), else (N, K); of `kind`
  int64_t b_step;
  int64_t k_real;    // what B has of K; the rest counts as zero
  int64_t n_real;    // what B has of N; the rest counts as zero
  int64_t by_rows;
  int64_t kind;      // of B: bf16, fp32, or codes of nf4 or int8, where K, N and `b_step` are multiples of 32
  double scale;      // of a B in fp32
  const float* scales;  // of codes, one for each 2^block neighbours
  int64_t block;        // at least 5
  const float* levels;  // of the 16 codes of nf4
};

namespace {

enum Kind { BF16, FP32, NF4, INT8 };
struct Buffer {
  bf16* at = nullptr;
  size_t size = 0;
  bf16* room(size_t numbers) {
    if (numbers > size) {
      free(at);
      at = (bf16*)aligned_alloc(64, (numbers * sizeof(bf16) + 63) / 64 * 64);
      size = numbers;
    }
    return at;
  }
  ~Buffer() { free(at); }
};
thread_local Buffer packed_of_thread;

// 32 numbers from `at`, of their codes; computed in fp32 and rounded once.
inline __m512i decode32(const Part& p, int64_t at) {
  const __m512 scale = _mm512_set1_ps(p.scales[at >> p.block]);
  __m512 low, high;
  if (p.kind == NF4) {  // two a byte, the first in its upper half
    const __m128i codes = _mm_loadu_si128((const __m128i*)((const uint8_t*)p.b + at / 2)), half = _mm_set1_epi8(15);
    const __m128i upper = _mm_and_si128(_mm_srli_epi16(codes, 4), half), lower = _mm_and_si128(codes, half);
    const __m512 levels = _mm512_loadu_ps(p.levels);
    low = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(upper, lower)), levels);
    high = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpackhi_epi8(upper, lower)), levels);
  } else {
    const __m128i* from = (const __m128i*)((const int8_t*)p.b + at);
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
  }
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale));
}

// `count` of 32 numbers from `at`, as bf16; the others are zero.
inline __m512i read32(const Part& p, int64_t at, int64_t count) {
  if (count <= 0) return _mm512_setzero_si512();
  const __mmask32 mask = count >= 32 ? ~0u : (1u << count) - 1;
  if (p.kind >= NF4) return decode32(p, at);
  if (p.kind == BF16) return _mm512_maskz_loadu_epi16(mask, (const bf16*)p.b + at);
  const float* from = (const float*)p.b + at;
  const __m512 scale = _mm512_set1_ps((float)p.scale);
  const __m512 low = _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)mask, from), scale);
  const __m512 high =
      _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)(mask >> 16), from + 16), scale);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// 32 of K of one panel: two tiles of 16 columns, rows of which are pairs along K.
static inline void pack_step(const Part& p, int64_t n0, int64_t k0, bf16* to) {
  if (p.by_rows) {
    for (int64_t pair = 0; pair < 16; pair++) {
      const int64_t k = k0 + 2 * pair, columns = p.n_real - n0;
      const __m512i one = read32(p, k * p.b_step + n0, k < p.k_real ? columns : 0);
      const __m512i two = read32(p, (k + 1) * p.b_step + n0, k + 1 < p.k_real ? columns : 0);
      for (int j = 0; j < 2; j++) {
        const __m256i low = j ? _mm512_extracti64x4_epi64(one, 1) : _mm512_castsi512_si256(one);
        const __m256i high = j ? _mm512_extracti64x4_epi64(two, 1) : _mm512_castsi512_si256(two);
        const __m512i both =
            _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        _mm512_store_si512(to + j * TILE + pair * 32, both);
      }
    }
    return;
  }
  for (int j = 0; j < 2; j++) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++) {
      const int64_t n = n0 + 16 * j + i;
      rows[i] = read32(p, n * p.b_step + k0, n < p.n_real ? p.k_real - k0 : 0);
    }
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + j * TILE + i * 32, rows[i]);
  }
}

// One panel of a part.
static inline void pack(const Part& p, int64_t n0, bf16* to) {
  for (int64_t k0 = 0; k0 < p.k; k0 += 32, to += 2 * TILE) pack_step(p, n0, k0, to);
}

// Some panels of a part, `apart` numbers from one another; each row of B is read in one go.
static inline void pack_rows(const Part& p, int64_t first, int64_t last, int64_t apart, bf16* to) {
  for (int64_t k0 = 0; k0 < p.k; k0 += 32, to += 2 * TILE)
    for (int64_t panel = first; panel < last; panel++)
      pack_step(p, panel * PANEL, k0, to + (panel - first) * apart);
}

#if defined(__AMX_BF16__)
template <bool TWO>
static inline void multiply_tiles(const Part* parts, int64_t count, int64_t m0, const bf16* packed, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < count; i++) {
    const Part& p = parts[i];
    const bf16* a = p.a + m0 * p.a_step;
    const int64_t step = p.a_step * 2;
    for (int64_t k = 0; k < p.k; k += 32) {
      _tile_loadd(6, packed, 64);
      _tile_loadd(4, a + k, step);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, packed + TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO) {
        _tile_loadd(5, a + 16 * p.a_step + k, step);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      packed += 2 * TILE;
    }
  }
  _tile_stored(0, sums, PANEL * 4);
  _tile_stored(1, sums + 16, PANEL * 4);
  if (TWO) {
    _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
  }
}
#endif

template <int ROWS>
static void multiply_rows(const Part* parts, int64_t count, int64_t m0, const bf16* packed, float* to) {
  Sums<ROWS> sums;
  sums.zero();
  for (int64_t i = 0; i < count; i++) {
    const bf16* a = parts[i].a + m0 * parts[i].a_step;
    for (int64_t k = 0; k < parts[i].k; k += 32, packed += 2 * TILE) sums.add(a + k, parts[i].a_step, packed);
  }
  sums.store(to, PANEL);
}

// The sum over parts of `rows` rows of A from m0 (32 at most; `shape_tiles` was told of them) times one packed panel.
static inline void multiply(const Part* parts, int64_t count, int64_t m0, int64_t rows, const bf16* packed,
                            float* sums) {
#if defined(__AMX_BF16__)
  if (afina_tiles) {
    if (rows > 16)
      multiply_tiles<true>(parts, count, m0, packed, sums);
    else
      multiply_tiles<false>(parts, count, m0, packed, sums);
    return;
  }
#endif
  int64_t m = 0;
  for (; m + 8 <= rows; m += 8) multiply_rows<8>(parts, count, m0 + m, packed, sums + m * PANEL);
  if (rows - m >= 4) {
    multiply_rows<4>(parts, count, m0 + m, packed, sums + m * PANEL);
    m += 4;
  }
  for (; m < rows; m++) multiply_rows<1>(parts, count, m0 + m, packed, sums + m * PANEL);
}

}  // namespace
