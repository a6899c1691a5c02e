// Cross-entropy of rows of products, and its slope in their place: the head's loss, a row at a time in the cache.
//
//   z_v = cap(scale · (x_v + b_v)),   cap(z) = c·tanh(z / c),   loss = log Σ_v exp(z_v) − z_target
//   ∂loss/∂x_v = (exp(z_v − log Σ) − [v = target]) · scale · (1 − (z_v / c)²)
//
// A row is read for its largest logit, for the sum, and for the slope. Exponents are of two, so that scale and base are
// one factor. A row is one thread's, in one order: what it gives does not depend on how many threads there are.
#include "numbers.h"
#include <cmath>
#include <cstring>

namespace {

const float LOG2E = 1.44269504f;

// 2^t to fp32's accuracy; NaN stays NaN. The polynomial is nearest to 2^f, relatively, for f from −½ to ½.
inline __m512 exp2_of(__m512 t) {
  t = _mm512_max_ps(_mm512_set1_ps(-1000.f), t);
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(0.00015345812f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0013399931f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009618489f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055503286f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24022646f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931472f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, n);
}

// tanh(y), given −2 log2(e) y.
inline __m512 tanh_of(__m512 t) {
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 e = exp2_of(_mm512_min_ps(_mm512_set1_ps(60.f), t));
  return _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
}

struct Form {
  const bf16* narrow_bias;
  const float* wide_bias;
  float scale, cap;  // cap 0: none
};

template <bool BIAS, bool CAP>
struct Row {
  const Form& form;
  bf16* x;
  int64_t size;

  // Sixteen products with their bias; lanes from n on are zero.
  inline __m512 product(int64_t v, int n) const {
    const __m512 p = n == 16 ? load16(x + v) : load_n(x + v, n);
    if (!BIAS) return p;
    if (form.wide_bias)
      return _mm512_add_ps(
          p, _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), form.wide_bias + v));
    return _mm512_add_ps(p, n == 16 ? load16(form.narrow_bias + v) : load_n(form.narrow_bias + v, n));
  }

  // tanh(scale · product / cap)
  inline __m512 bent(__m512 p) const {
    return tanh_of(_mm512_mul_ps(p, _mm512_set1_ps(-2 * LOG2E * form.scale / form.cap)));
  }

  // What the largest logit belongs to: the products' largest, or least where the scale is negative.
  double most() const {
    const float sign = form.scale < 0 ? -1.f : 1.f;
    const __m512 signs = _mm512_set1_ps(sign), least = _mm512_set1_ps(-INFINITY);
    __m512 m0 = least, m1 = least;
    int64_t v = 0;
    for (; v + 32 <= size; v += 32) {
      m0 = _mm512_max_ps(m0, _mm512_mul_ps(product(v, 16), signs));
      m1 = _mm512_max_ps(m1, _mm512_mul_ps(product(v + 16, 16), signs));
    }
    for (; v < size; v += 16) {
      const int n = size - v < 16 ? (int)(size - v) : 16;
      const __m512 p = _mm512_mul_ps(product(v, n), signs);
      m0 = _mm512_mask_max_ps(m0, (__mmask16)((1u << n) - 1), m0, p);
    }
    return logit(sign * _mm512_reduce_max_ps(_mm512_max_ps(m0, m1)));
  }

  double logit(float p) const {
    const double z = (double)form.scale * p;
    return CAP ? form.cap * std::tanh(z / form.cap) : z;
  }

  double logit_at(int64_t v) const {
    float p = wide(x[v]);
    if (BIAS) p += form.wide_bias ? form.wide_bias[v] : wide(form.narrow_bias[v]);
    return logit(p);
  }

  // What makes exponents of two from products, or from their tanh.
  float factor() const { return LOG2E * (CAP ? form.cap : form.scale); }

  // Logits of one such exponent: ln 2, but for the factor's rounding, which would else be the loss's.
  double unit() const { return (double)(CAP ? form.cap : form.scale) / factor(); }

  // exp(logit) / 2^off of sixteen.
  inline __m512 share(__m512 p, float off) const {
    return exp2_of(_mm512_fmadd_ps(p, _mm512_set1_ps(factor()), _mm512_set1_ps(-off)));
  }

  double log_sum() const {
    const float off = (float)(most() / unit());
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                      _mm512_setzero_ps()};
    int64_t v = 0;
    for (; v + 64 <= size; v += 64)
      for (int i = 0; i < 4; i++) {
        const __m512 p = product(v + 16 * i, 16);
        sums[i] = _mm512_add_ps(sums[i], share(CAP ? bent(p) : p, off));
      }
    for (; v < size; v += 16) {
      const int n = size - v < 16 ? (int)(size - v) : 16;
      const __m512 p = product(v, n), e = share(CAP ? bent(p) : p, off);
      sums[0] = _mm512_mask_add_ps(sums[0], (__mmask16)((1u << n) - 1), sums[0], e);
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    return unit() * off + std::log((double)_mm512_reduce_add_ps(sum));
  }

  // Slopes times `above`, in the products' place.
  void bend(double log_sum, int64_t target, float above) {
    const float off = (float)(log_sum / unit());
    const double z = logit_at(target);
    const __m512 factor = _mm512_set1_ps(above * form.scale), one = _mm512_set1_ps(1.f);
    for (int64_t v = 0; v < size; v += 16) {
      const int n = size - v < 16 ? (int)(size - v) : 16;
      const __m512 p = product(v, n), t = CAP ? bent(p) : p;
      __m512 s = _mm512_mul_ps(share(t, off), factor);
      if (CAP) s = _mm512_mul_ps(s, _mm512_fnmadd_ps(t, t, one));
      if (n == 16) store16(x + v, s);
      else store_n(x + v, s, n);
    }
    // Rounded once: the share of the target less 1, not a rounded share less 1.
    const double t = CAP ? z / form.cap : 0;
    x[target] = narrow((float)(std::expm1(z - log_sum) * above * form.scale * (1 - t * t)));
  }
};

// What is asked of all rows.
struct Task {
  int64_t rows, size;
  const int64_t* targets;
  int64_t ignored;
  const float* above;
  float* losses;
  bool bend;
};

template <bool BIAS, bool CAP>
void run(const Form& form, bf16* x, const Task& task) {
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < task.rows; c++) {
    Row<BIAS, CAP> row{form, x + c * task.size, task.size};
    const int64_t target = task.targets[c];
    if (target == task.ignored) {
      task.losses[c] = 0;
      if (task.bend) std::memset(row.x, 0, (size_t)row.size * sizeof(bf16));
      continue;
    }
    const double log_sum = row.log_sum();
    task.losses[c] = (float)(log_sum - row.logit_at(target));
    if (task.bend) row.bend(log_sum, target, task.above ? task.above[c] : 1.f);
  }
}

}  // namespace

// x: rows of products, one after the other; with `bend` their slopes take their place, times `above` where it is given.
// Targets lie in the row, or are `ignored`: no loss, no slope.
extern "C" void afina_loss(bf16* x, int64_t rows, int64_t size, const void* bias, int64_t bias_wide,
                           double scale, double cap, const int64_t* targets, int64_t ignored,
                           const float* above, float* losses, int64_t bend) {
  const Form form{bias_wide ? nullptr : (const bf16*)bias, bias_wide ? (const float*)bias : nullptr,
                  (float)scale, (float)cap};
  const Task task{rows, size, targets, ignored, above, losses, bend != 0};
  if (bias) cap > 0 ? run<true, true>(form, x, task) : run<true, false>(form, x, task);
  else cap > 0 ? run<false, true>(form, x, task) : run<false, false>(form, x, task);
}
