// What lies between the matrix products of a block: norms, rotations, gates; read once, written once, fp32 inside.
#include <cmath>
#include <omp.h>

#include "exponent.h"
#include "numbers.h"
#include "transpose.h"

// 1 / (1 + exp(-x)): the reciprocal to 14 bits, and once Newton's way further.
static inline __m512 sigmoid(__m512 x) {
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), exponent(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  const __m512 r = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f)));
}

extern "C" {

// h = w * (x / rms(x)), rounded before the weight as the models do; rstd[t] = 1 / rms. `width` is a multiple of 16.
void afina_norm(const bf16* x, const bf16* weight, double eps, int64_t tokens, int64_t width, bf16* h,
                float* rstd) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const bf16* from = x + t * width;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 v = load16(from + i);
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    const float r = 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / (float)width + (float)eps);
    const __m512 scale = _mm512_set1_ps(r);
    for (int64_t i = 0; i < width; i += 16) {
      bf16 rounded[16];
      store16(rounded, _mm512_mul_ps(load16(from + i), scale));
      store16(h + t * width + i, _mm512_mul_ps(load16(rounded), load16(weight + i)));
    }
    rstd[t] = r;
  }
}

// dx = above + r (w dh - x r^2 mean(w dh x)), with r = rstd; `dx` may be `above`.
void afina_norm_back(const bf16* dh, const bf16* x, const bf16* weight, const float* rstd,
                     const bf16* above, int64_t tokens, int64_t width, bf16* dx) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t at = t * width;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16)
      sum = _mm512_fmadd_ps(_mm512_mul_ps(load16(dh + at + i), load16(weight + i)), load16(x + at + i), sum);
    const float r = rstd[t];
    const __m512 scale = _mm512_set1_ps(r);
    const __m512 inner = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)width * r * r * r);
    for (int64_t i = 0; i < width; i += 16) {
      __m512 v = _mm512_mul_ps(_mm512_mul_ps(load16(dh + at + i), load16(weight + i)), scale);
      v = _mm512_fnmadd_ps(load16(x + at + i), inner, v);
      store16(dx + at + i, _mm512_add_ps(v, load16(above + at + i)));
    }
  }
}

// Turns each pair (x[i], x[i + width / 2]) of every head by its position's angle; back with `sign` = -1.
void afina_rotate(bf16* x, int64_t step, const bf16* cosine, const bf16* sine, int64_t tokens, int64_t heads,
                  int64_t width, double sign) {
  const int64_t half = width / 2;
  const __m512 way = _mm512_set1_ps((float)sign);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < half; i += 16) {
      const int here = (int)(half - i < 16 ? half - i : 16);
      const __m512 c0 = load_n(cosine + t * width + i, here), c1 = load_n(cosine + t * width + half + i, here);
      const __m512 s0 = _mm512_mul_ps(load_n(sine + t * width + i, here), way);
      const __m512 s1 = _mm512_mul_ps(load_n(sine + t * width + half + i, here), way);
      for (int64_t head = 0; head < heads; head++) {
        bf16* at = x + t * step + head * width + i;
        const __m512 a = load_n(at, here), b = load_n(at + half, here);
        // Back, the sine belongs to the number that it was multiplied to.
        const __m512 first = sign > 0 ? s0 : s1, second = sign > 0 ? s1 : s0;
        store_n(at, _mm512_fnmadd_ps(b, first, _mm512_mul_ps(a, c0)), here);
        store_n(at + half, _mm512_fmadd_ps(a, second, _mm512_mul_ps(b, c1)), here);
      }
    }
  }
}

// m = silu(gate) * up.
void afina_gate(const bf16* gate, const bf16* up, int64_t step, int64_t tokens, int64_t width, bf16* m) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 g = load16(gate + t * step + i), u = load16(up + t * step + i);
      const __m512 s = sigmoid(g);
      store16(m + t * width + i, _mm512_mul_ps(_mm512_mul_ps(g, s), u));
    }
}

// From dm: the gradients of gate and up, and m again; the gradients may take the place of gate and up.
void afina_gate_back(const bf16* dm, const bf16* gate, const bf16* up, int64_t step, int64_t tokens,
                     int64_t width, bf16* d_gate, bf16* d_up, bf16* m) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 g = load16(gate + t * step + i), u = load16(up + t * step + i);
      const __m512 d = load16(dm + t * width + i), one = _mm512_set1_ps(1.0f);
      const __m512 s = sigmoid(g);
      const __m512 act = _mm512_mul_ps(g, s);
      // silu'(g) = s (1 + g (1 - s)) = s + act (1 - s)
      const __m512 slope = _mm512_fmadd_ps(act, _mm512_sub_ps(one, s), s);
      store16(m + t * width + i, _mm512_mul_ps(act, u));
      store16(d_gate + t * step + i, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
      store16(d_up + t * step + i, _mm512_mul_ps(d, act));
    }
}

// out[c][t] = x[t][c] for the first `columns` of x, whose rows have as many up to a multiple of 16 or `step`; from
// `tokens` to `padded`, a multiple of 32, zeros.
void afina_turned(const bf16* x, int64_t step, int64_t tokens, int64_t columns, bf16* out, int64_t padded) {
#pragma omp parallel for schedule(static)
  for (int64_t c0 = 0; c0 < columns; c0 += 16) {
    const int64_t here = columns - c0 < 16 ? columns - c0 : 16;
    const __mmask16 mask = (__mmask16)((1u << here) - 1);
    for (int64_t t0 = 0; t0 < padded; t0 += 32) {
      __m512i pairs[16];  // sixteen columns of two tokens
      for (int64_t i = 0; i < 16; i++) {
        const int64_t t = t0 + 2 * i;
        const __m256i none = _mm256_setzero_si256();
        const __m256i one = t < tokens ? _mm256_maskz_loadu_epi16(mask, x + t * step + c0) : none;
        const __m256i two = t + 1 < tokens ? _mm256_maskz_loadu_epi16(mask, x + (t + 1) * step + c0) : none;
        pairs[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(one), _mm512_slli_epi32(_mm512_cvtepu16_epi32(two), 16));
      }
      transpose(pairs);
      for (int64_t c = 0; c < here; c++) _mm512_storeu_si512(out + (c0 + c) * padded + t0, pairs[c]);
    }
  }
}

// out[c] = sum over t of dy[t][c], or with x of dy[t][c] times x[t][c] rstd[t], rounded as in `afina_norm`.
void afina_sums(const bf16* dy, int64_t step, const bf16* x, const float* rstd, int64_t tokens, int64_t width,
                bf16* out) {
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < width; c += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t t = 0; t < tokens; t++) {
      __m512 v = load16(dy + t * step + c);
      if (x) {
        bf16 rounded[16];
        store16(rounded, _mm512_mul_ps(load16(x + t * width + c), _mm512_set1_ps(rstd[t])));
        v = _mm512_mul_ps(v, load16(rounded));
      }
      sum = _mm512_add_ps(sum, v);
    }
    store16(out + c, sum);
  }
}

// dz = gain * dy column by column, and sums[c] = sum over t of dy[t][c] z[t][c]; dz may be dy. `width` is a multiple of 32.
void afina_gain_back(const bf16* dy, int64_t dy_step, const bf16* z, int64_t z_step, const float* gain,
                     int64_t tokens, int64_t width, bf16* dz, int64_t dz_step, float* sums) {
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < width; c += 32) {
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const __m512 by[2] = {_mm512_loadu_ps(gain + c), _mm512_loadu_ps(gain + c + 16)};
    for (int64_t t = 0; t < tokens; t++)
      for (int j = 0; j < 2; j++) {
        const __m512 v = load16(dy + t * dy_step + c + 16 * j);
        sum[j] = _mm512_fmadd_ps(v, load16(z + t * z_step + c + 16 * j), sum[j]);
        store16(dz + t * dz_step + c + 16 * j, _mm512_mul_ps(v, by[j]));
      }
    _mm512_storeu_ps(sums + c, sum[0]);
    _mm512_storeu_ps(sums + c + 16, sum[1]);
  }
}

}  // extern "C"
