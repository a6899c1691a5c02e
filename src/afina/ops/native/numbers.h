// bf16 in memory, fp32 in registers.
#pragma once
#include <cstdint>
#include <immintrin.h>

typedef uint16_t bf16;

static inline float wide(bf16 x) {
  union { uint32_t i; float f; } u;
  u.i = (uint32_t)x << 16;
  return u.f;
}

// To the nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float x) {
  union { float f; uint32_t i; } u;
  u.f = x;
  if (x != x) return (bf16)((u.i >> 16) | 0x40);
  return (bf16)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

#if defined(__AVX512BF16__)
static inline __m512 load16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void store16(bf16* p, __m512 x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
// The first n of sixteen; the others are zero.
static inline __m512 load_n(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)), 16));
}
static inline void store_n(bf16* p, __m512 x, int n) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)_mm512_cvtneps_pbh(x));
}
#endif
