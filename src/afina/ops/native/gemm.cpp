// C = alpha * gain * (sum over parts of A B) + bias + residual, column by column, sums in fp32 and rounded once; or
// C += that, where C is fp32.
//
// What stands beside one another in a model is one product here: a frozen map and the low-rank path at its side, or
// the gradients that several maps give back to the input they share. A part's B is packed in pairs of rows as it is
// read, so that weights lie in memory once, as the model has them.
//
// The columns of C are shared out among threads in panels of 32. Each thread packs its panels, then walks over rows of
// A, so many at a time as stay in its cache.
#include <algorithm>
#include <omp.h>

#include "product.h"

namespace {

// Numbers of A that are gone through with one panel after the other: few where all of a thread's packed panels stay in
// its core's cache, which they stream from; else many, for then each panel should come by rarely.
const int64_t FEW = 24 * 1024, MANY = 320 * 1024, CACHED = 512 * 1024;

struct Out {
  void* c;
  int64_t step;
  bool wide, more;  // fp32; added to what is there
  float alpha;
  const float* gain;  // of each column, or none
  bf16* raw;          // gets alpha * the sums, or nothing
  int64_t raw_step;
  const bf16* bias;
  const bf16* residual;
  int64_t residual_step;
};

void finish(const Out& out, const float* sums, int64_t m0, int64_t rows, int64_t n0, int64_t columns) {
  const __m512 alpha = _mm512_set1_ps(out.alpha);
  for (int64_t n = 0; n < columns; n += 16) {
    const int here = (int)std::min<int64_t>(16, columns - n);
    const __m512 bias = out.bias ? load_n(out.bias + n0 + n, here) : _mm512_setzero_ps();
    const __mmask16 these = (__mmask16)((1u << here) - 1);
    const __m512 factor = out.gain ? _mm512_mul_ps(alpha, _mm512_maskz_loadu_ps(these, out.gain + n0 + n)) : alpha;
    for (int64_t m = 0; m < rows; m++) {
      const __m512 sum = _mm512_load_ps(sums + m * PANEL + n);
      __m512 x = _mm512_fmadd_ps(sum, factor, bias);
      const int64_t row = m0 + m;
      if (out.raw) store_n(out.raw + row * out.raw_step + n0 + n, _mm512_mul_ps(sum, alpha), here);
      if (out.residual)
        x = _mm512_add_ps(x, load_n(out.residual + row * out.residual_step + n0 + n, here));
      if (out.wide) {
        float* at = (float*)out.c + row * out.step + n0 + n;
        if (out.more) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(these, at));
        _mm512_mask_storeu_ps(at, these, x);
      } else
        store_n((bf16*)out.c + row * out.step + n0 + n, x, here);
    }
  }
}

}  // namespace

extern "C" void afina_gemm(int64_t m, int64_t n, const Part* parts, int64_t count, void* c,
                           int64_t c_step, int64_t c_wide, int64_t more, double alpha, const float* gain,
                           bf16* raw, int64_t raw_step, const bf16* bias, const bf16* residual,
                           int64_t residual_step) {
  if (m <= 0 || n <= 0) return;
  const Out out{c, c_step, c_wide != 0, more != 0, (float)alpha, gain, raw, raw_step, bias, residual, residual_step};
  const int64_t panels = (n + PANEL - 1) / PANEL;
  int64_t depth = 0;
  for (int64_t i = 0; i < count; i++) depth += parts[i].k;
  const int64_t blocks = (m + 31) / 32;
  const int threads = omp_get_max_threads();
  // Few panels cannot be shared out evenly: then rows are, too.
  const int64_t cuts = panels >= 6 * threads || panels % threads == 0 ? 1 : std::min<int64_t>(2 * threads, blocks);
  const int64_t units = panels * cuts;
#pragma omp parallel num_threads(threads)
  {
    const int id = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t first = units * id / all, last = units * (id + 1) / all;
    if (first < last) {
      alignas(64) float sums[32 * PANEL];
      const int64_t low = first / cuts, high = (last - 1) / cuts + 1, size = depth * PANEL;
      bf16* packed = packed_of_thread.room((size_t)((high - low) * size));
      bf16* to = packed;
      for (int64_t i = 0; i < count; to += parts[i].k * PANEL, i++) {
        if (parts[i].by_rows)
          pack_rows(parts[i], low, high, size, to);
        else
          for (int64_t panel = low; panel < high; panel++)
            pack(parts[i], panel * PANEL, to + (panel - low) * size);
      }
      int first_rows = 0, second_rows = 0;
      const int64_t numbers = (high - low) * size <= CACHED ? FEW : MANY;
      const int64_t together = std::max<int64_t>(1, numbers / std::max<int64_t>(depth, 1) / 32);
      for (int64_t start = 0; start < blocks; start += together) {
        const int64_t stop = std::min(blocks, start + together);
        for (int64_t panel = low; panel < high; panel++) {
          const bf16* from = packed + (panel - low) * size;
          const int64_t columns = std::min<int64_t>(PANEL, n - panel * PANEL);
          int64_t here = start, end = stop;
          if (cuts > 1) {  // of this panel, the rows that are this thread's
            const int64_t c0 = std::max<int64_t>(first - panel * cuts, 0);
            const int64_t c1 = std::min<int64_t>(last - panel * cuts, cuts);
            here = std::max(here, blocks * c0 / cuts);
            end = std::min(end, blocks * c1 / cuts);
          }
          for (int64_t block = here; block < end; block++) {
            const int64_t m0 = block * 32, rows = std::min<int64_t>(32, m - m0);
            const int one = (int)std::min<int64_t>(16, rows), two = (int)rows - one;
            if (one != first_rows || two != second_rows) {
              shape_tiles(one, two);
              first_rows = one;
              second_rows = two;
            }
            multiply(parts, count, m0, rows, from, sums);
            finish(out, sums, m0, rows, panel * PANEL, columns);
          }
        }
      }
      release_tiles();
    }
  }
}
