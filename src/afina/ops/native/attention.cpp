// Exact attention over the runs of a packed line, forward and backward.
//
//     S = scale Q K^T,  P = exp(S - L),  O = P V
//     D = rowsum(dO O),  dS = P (dO V^T - D) scale,  dQ = dS K,  dK = dS^T Q,  dV = P^T dO
//
// A unit is a key head and queries of a run: its keys are those of what comes before the run and its own. The queries
// of all heads that share the keys are taken 32 at a time; their scores lie in the core's cache, and no key behind the
// last that one of them sees is multiplied. Units are dealt out once and for all, so results do not depend on time.
#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>

#include "exponent.h"
#include "product.h"

namespace {

struct Runs {
  int64_t count;
  const int64_t *start, *length, *offset, *piece_start, *piece_length;
};

struct Line {
  const bf16* at;
  int64_t step;
};

const int64_t QUERIES = 512;  // of a head, that a unit has at most; a multiple of 32

struct Unit {
  int64_t run, head, begin, end, keys;  // queries [begin, end) of the run, of all that its keys these
  double cost;
};

// Units of about equal cost for each thread: the dearest first, to whoever has least.
std::vector<std::vector<Unit>> dealt(const Runs& runs, int64_t heads, int threads, bool causal) {
  std::vector<Unit> units;
  for (int64_t r = 0; r < runs.count; r++) {
    int64_t before = 0;
    for (int64_t p = runs.offset[r]; p < runs.offset[r + 1]; p++) before += runs.piece_length[p];
    for (int64_t begin = 0; begin < runs.length[r]; begin += QUERIES) {
      const int64_t end = std::min(begin + QUERIES, runs.length[r]), keys = before + (causal ? end : runs.length[r]);
      const double each = causal ? (double)before + (double)(begin + end) / 2 : (double)keys;
      for (int64_t h = 0; h < heads; h++)
        units.push_back({r, h, begin, end, keys, (each + 64) * (double)(end - begin + 32)});
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  std::vector<std::vector<Unit>> found((size_t)threads);
  std::vector<double> load((size_t)threads, 0.0);
  for (const Unit& unit : units) {
    const size_t least = (size_t)(std::min_element(load.begin(), load.end()) - load.begin());
    found[least].push_back(unit);
    load[least] += unit.cost;
  }
  return found;
}

template <class T>
struct Room {
  T* at = nullptr;
  size_t size = 0;
  T* take(size_t numbers) {
    if (numbers > size) {
      free(at);
      at = (T*)aligned_alloc(64, (numbers * sizeof(T) + 63) / 64 * 64);
      size = numbers;
    }
    return at;
  }
  ~Room() { free(at); }
};

thread_local Room<bf16> rooms16[10];
thread_local Room<float> rooms32[4];

// The rows of a unit's keys (or values) one after the other, zeros behind them.
void gather(const Line& x, const Runs& runs, const Unit& unit, int64_t width, int64_t padded, bf16* to) {
  const int64_t run = unit.run, column = unit.head * width;
  const bf16* begin = to;
  int64_t own = unit.keys;
  auto copy = [&](int64_t start, int64_t length) {
    for (int64_t t = start; t < start + length; t++, to += width)
      memcpy(to, x.at + t * x.step + column, (size_t)width * 2);
  };
  for (int64_t p = runs.offset[run]; p < runs.offset[run + 1]; p++) {
    copy(runs.piece_start[p], runs.piece_length[p]);
    own -= runs.piece_length[p];
  }
  copy(runs.start[run], own);
  memset(to, 0, (size_t)(padded * width - (to - begin)) * 2);
}

// `keys` and `by_rows` as in `pack`: all panels of B one after the other.
void pack_all(const bf16* b, int64_t step, int64_t k, int64_t k_real, int64_t n, int64_t n_real, bool by_rows,
              bf16* to) {
  const Part p{nullptr, 0, k, b, step, k_real, n_real, by_rows, 0, 1.0};
  for (int64_t at = 0; at < n; at += 32, to += k * 32) pack(p, at, to);
}

// 32 rows of a (zeros behind the last) times one packed panel, k deep.
inline void panel(const bf16* a, int64_t step, int64_t k, const bf16* packed, float* sums) {
  const Part p{a, step, k, nullptr, 0, 0, 0, 0, 0, 1.0};
  multiply(&p, 1, 0, 32, packed, sums);
}

// 32 queries of one head, zeros behind the last.
inline void queries(const Line& x, int64_t start, int64_t count, int64_t column, int64_t width, bf16* to) {
  for (int64_t i = 0; i < count; i++)
    memcpy(to + i * width, x.at + (start + i) * x.step + column, (size_t)width * 2);
  memset(to + count * width, 0, (size_t)((32 - count) * width) * 2);
}

// Keys [low, high) are seen by a query at `place`.
inline void seen(int64_t place, int64_t keys, bool causal, int64_t window, int64_t* low, int64_t* high) {
  *low = window ? std::max<int64_t>(0, place - window + 1) : 0;
  *high = causal ? place + 1 : window ? std::min(keys, place + window) : keys;
}

inline void turn(const bf16* from, int64_t rows, int64_t columns, bf16* to) {
  // (rows, columns) -> (columns, rows); both multiples of 32
  for (int64_t r = 0; r < rows; r += 32)
    for (int64_t c = 0; c < columns; c++) {
      alignas(64) bf16 line[32];
      for (int64_t i = 0; i < 32; i++) line[i] = from[(r + i) * columns + c];
      memcpy(to + c * rows + r, line, 64);
    }
}

}  // namespace

extern "C" {

void afina_attention_forward(const bf16* q, int64_t q_step, const bf16* k, int64_t k_step, const bf16* v,
                             int64_t v_step, bf16* out, int64_t out_step, float* logsum, int64_t heads,
                             int64_t key_heads, int64_t width, int64_t count, const int64_t* start,
                             const int64_t* length, const int64_t* offset, const int64_t* piece_start,
                             const int64_t* piece_length, double scale, int64_t causal, int64_t window) {
  const Runs runs{count, start, length, offset, piece_start, piece_length};
  const Line Q{q, q_step}, K{k, k_step}, V{v, v_step};
  const int64_t group = heads / key_heads;
  const int threads = omp_get_max_threads();
  const auto units = dealt(runs, key_heads, threads, causal != 0);
#pragma omp parallel num_threads(threads)
  {
    shape_tiles(16, 16);
    alignas(64) float sums[32 * 32];
    for (int id = omp_get_thread_num(); id < threads; id += omp_get_num_threads())
      for (const Unit& unit : units[(size_t)id]) {
        const int64_t r = unit.run, keys = unit.keys, padded = (keys + 31) / 32 * 32;
        int64_t first = 0;
        for (int64_t p = offset[r]; p < offset[r + 1]; p++) first += piece_length[p];
        const size_t size = (size_t)(padded * width);
        bf16* rows = rooms16[0].take(size);
        bf16* packed_k = rooms16[1].take(size);
        bf16* packed_v = rooms16[2].take(size);
        gather(K, runs, unit, width, padded, rows);
        pack_all(rows, width, width, width, padded, padded, false, packed_k);
        gather(V, runs, unit, width, padded, rows);
        pack_all(rows, width, padded, padded, width, width, true, packed_v);
        bf16* block = rooms16[3].take((size_t)(32 * width));
        float* scores = rooms32[0].take((size_t)(32 * padded));
        bf16* weights = rooms16[4].take((size_t)(32 * padded));
        for (int64_t head = unit.head * group; head < (unit.head + 1) * group; head++)
          for (int64_t i0 = unit.begin; i0 < unit.end; i0 += 32) {
            const int64_t here = std::min<int64_t>(32, unit.end - i0);
            queries(Q, start[r] + i0, here, head * width, width, block);
            int64_t low, high, other;
            seen(first + i0, keys, causal, window, &low, &other);
            seen(first + i0 + here - 1, keys, causal, window, &other, &high);
            low = low / 32 * 32;
            high = (high + 31) / 32 * 32;
            const int64_t wide = high - low;
            for (int64_t j = low; j < high; j += 32) {
              panel(block, width, width, packed_k + j * width, sums);
              for (int64_t i = 0; i < 32; i++) {
                _mm512_store_ps(scores + i * wide + j - low, _mm512_load_ps(sums + i * 32));
                _mm512_store_ps(scores + i * wide + j - low + 16, _mm512_load_ps(sums + i * 32 + 16));
              }
            }
            float by[32];
            for (int64_t i = 0; i < 32; i++) {
              bf16* to = weights + i * wide;
              if (i >= here) {
                memset(to, 0, (size_t)wide * 2);
                continue;
              }
              const float* from = scores + i * wide;
              int64_t a, b;
              seen(first + i0 + i, keys, causal, window, &a, &b);
              a -= low;
              b -= low;
              __m512 most = _mm512_set1_ps(-INFINITY);
              const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
              auto mask = [&](int64_t j) {
                const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)j));
                return _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32((int)a)) &
                       _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32((int)b));
              };
              for (int64_t j = 0; j < wide; j += 16)
                most = _mm512_mask_max_ps(most, mask(j), most, _mm512_load_ps(from + j));
              const float top = _mm512_reduce_max_ps(most) * (float)scale;
              const __m512 s = _mm512_set1_ps((float)scale), t = _mm512_set1_ps(top);
              __m512 total = _mm512_setzero_ps();
              for (int64_t j = 0; j < wide; j += 16) {
                const __m512 e = _mm512_maskz_mov_ps(
                    mask(j), exponent(_mm512_fmsub_ps(_mm512_load_ps(from + j), s, t)));
                total = _mm512_add_ps(total, e);
                store16(to + j, e);
              }
              const float sum = _mm512_reduce_add_ps(total);
              by[i] = 1.0f / sum;
              logsum[(start[r] + i0 + i) * heads + head] = top + std::log(sum);
            }
            for (int64_t n = 0; n < width; n += 32) {
              panel(weights, wide, wide, packed_v + n * padded + low * 32, sums);
              for (int64_t i = 0; i < here; i++) {
                bf16* to = out + (start[r] + i0 + i) * out_step + head * width + n;
                const __m512 f = _mm512_set1_ps(by[i]);
                store16(to, _mm512_mul_ps(_mm512_load_ps(sums + i * 32), f));
                store16(to + 16, _mm512_mul_ps(_mm512_load_ps(sums + i * 32 + 16), f));
              }
            }
          }
      }
    release_tiles();
  }
}

void afina_attention_backward(const bf16* q, int64_t q_step, const bf16* k, int64_t k_step, const bf16* v,
                              int64_t v_step, const bf16* out, int64_t out_step, const float* logsum,
                              const bf16* by_out, int64_t by_out_step, bf16* by_q, int64_t by_q_step, bf16* by_k,
                              int64_t by_k_step, bf16* by_v, int64_t by_v_step, int64_t heads, int64_t key_heads,
                              int64_t width, int64_t count, const int64_t* start, const int64_t* length,
                              const int64_t* offset, const int64_t* piece_start, const int64_t* piece_length,
                              double scale, int64_t causal, int64_t window, int64_t tokens, int64_t shares, float* work) {
  const Runs runs{count, start, length, offset, piece_start, piece_length};
  const Line Q{q, q_step}, K{k, k_step}, V{v, v_step}, G{by_out, by_out_step};
  const int64_t group = heads / key_heads, all = tokens * key_heads * width;
  const int threads = (int)shares;  // `work` has room for so many
  const auto units = dealt(runs, key_heads, threads, causal != 0);
#pragma omp parallel num_threads(threads)
  {
    shape_tiles(16, 16);
    alignas(64) float sums[32 * 32], other[32 * 32];
    for (int id = omp_get_thread_num(); id < threads; id += omp_get_num_threads()) {
      float* of_k = work + 2 * all * id;
      float* of_v = of_k + all;
      memset(of_k, 0, (size_t)(2 * all) * 4);
      for (const Unit& unit : units[(size_t)id]) {
        const int64_t r = unit.run, keys = unit.keys, padded = (keys + 31) / 32 * 32;
        int64_t first = 0;
        for (int64_t p = offset[r]; p < offset[r + 1]; p++) first += piece_length[p];
        const size_t size = (size_t)(padded * width);
        bf16* rows_k = rooms16[0].take(size);
        bf16* rows_v = rooms16[1].take(size);
        bf16* k_inward = rooms16[2].take(size);  // K^T, as rows of A
        gather(K, runs, unit, width, padded, rows_k);
        gather(V, runs, unit, width, padded, rows_v);
        turn(rows_k, padded, width, k_inward);
        float* sum_k = rooms32[0].take(size);
        float* sum_v = rooms32[1].take(size);
        memset(sum_k, 0, size * 4);
        memset(sum_v, 0, size * 4);
        bf16* block = rooms16[3].take((size_t)(64 * width));
        bf16* above = block + 32 * width;
        bf16* packed = rooms16[4].take((size_t)(4 * 32 * width));
        bf16 *q_across = packed, *g_across = packed + 32 * width;
        bf16 *q_down = packed + 64 * width, *g_down = packed + 96 * width;
        bf16* slopes = rooms16[5].take((size_t)(32 * padded));   // dS^T: keys by queries
        bf16* slopes_packed = rooms16[6].take((size_t)(32 * padded));
        for (int64_t head = unit.head * group; head < (unit.head + 1) * group; head++)
          for (int64_t i0 = unit.begin; i0 < unit.end; i0 += 32) {
            const int64_t here = std::min<int64_t>(32, unit.end - i0);
            queries(Q, start[r] + i0, here, head * width, width, block);
            queries(G, start[r] + i0, here, head * width, width, above);
            pack_all(block, width, width, width, 32, 32, false, q_across);
            pack_all(above, width, width, width, 32, 32, false, g_across);
            pack_all(block, width, 32, 32, width, width, true, q_down);
            pack_all(above, width, 32, 32, width, width, true, g_down);
            alignas(64) float inner[32] = {}, ends[32];
            alignas(64) int from[32], to[32];
            int64_t low = keys, high = 0;
            for (int64_t i = 0; i < 32; i++) {
              from[i] = to[i] = 0;
              ends[i] = 0;
              if (i >= here) continue;
              const int64_t t = start[r] + i0 + i;
              int64_t a, b;
              seen(first + i0 + i, keys, causal, window, &a, &b);
              from[i] = (int)a;
              to[i] = (int)b;
              low = std::min(low, a);
              high = std::max(high, b);
              ends[i] = logsum[t * heads + head];
              __m512 sum = _mm512_setzero_ps();
              for (int64_t w = 0; w < width; w += 16)
                sum = _mm512_fmadd_ps(load16(out + t * out_step + head * width + w), load16(above + i * width + w), sum);
              inner[i] = _mm512_reduce_add_ps(sum);
            }
            low = low / 32 * 32;
            high = (high + 31) / 32 * 32;
            const __m512 s = _mm512_set1_ps((float)scale);
            for (int64_t j = low; j < high; j += 32) {
              alignas(64) bf16 weights[32 * 32];
              panel(rows_k + j * width, width, width, q_across, sums);
              panel(rows_v + j * width, width, width, g_across, other);
              bf16* slope = slopes + (j - low) * 32;
              for (int half = 0; half < 32; half += 16) {
                const __m512 end = _mm512_load_ps(ends + half), mean = _mm512_load_ps(inner + half);
                const __m512i a = _mm512_load_si512(from + half), b = _mm512_load_si512(to + half);
                for (int64_t n = 0; n < 32; n++) {
                  const __m512i key = _mm512_set1_epi32((int)(j + n));
                  const __mmask16 visible = _mm512_cmpge_epi32_mask(key, a) & _mm512_cmplt_epi32_mask(key, b);
                  const __m512 p = _mm512_maskz_mov_ps(
                      visible, exponent(_mm512_fmsub_ps(_mm512_load_ps(sums + n * 32 + half), s, end)));
                  const __m512 d = _mm512_mul_ps(
                      _mm512_mul_ps(p, s), _mm512_sub_ps(_mm512_load_ps(other + n * 32 + half), mean));
                  store16(weights + n * 32 + half, p);
                  store16(slope + n * 32 + half, d);
                }
              }
              // dV += P^T dO, dK += dS^T Q: 32 keys at a time
              for (int64_t w = 0; w < width; w += 32) {
                float* at[2] = {sum_v + j * width + w, sum_k + j * width + w};
                const bf16* left[2] = {weights, slope};
                const bf16* right[2] = {g_down + w * 32, q_down + w * 32};
                for (int which = 0; which < 2; which++) add_product(left[which], right[which], at[which], width);
              }
            }
            // dQ^T = K^T dS^T
            const int64_t wide = high - low;
            pack_all(slopes, 32, wide, wide, 32, 32, true, slopes_packed);
            for (int64_t w = 0; w < width; w += 32) {
              panel(k_inward + w * padded + low, padded, wide, slopes_packed, sums);
              for (int64_t half = 0; half < 32; half += 16)
                for (int64_t c = 0; c < 32; c += 16) {
                  __m512i tile[16];
                  for (int64_t n = 0; n < 16; n++)
                    tile[n] = _mm512_castps_si512(_mm512_load_ps(sums + (half + n) * 32 + c));
                  transpose(tile);
                  for (int64_t i = c; i < std::min<int64_t>(c + 16, here); i++)
                    store16(by_q + (start[r] + i0 + i) * by_q_step + head * width + w + half,
                            _mm512_castsi512_ps(tile[i - c]));
                }
            }
          }
        // to the tokens that the keys are of
        int64_t key = 0;
        auto add = [&](int64_t begin, int64_t many) {
          for (int64_t t = begin; t < begin + many; t++, key++)
            for (int64_t w = 0; w < width; w += 16) {
              float* a = of_k + (t * key_heads + unit.head) * width + w;
              float* b = of_v + (t * key_heads + unit.head) * width + w;
              _mm512_storeu_ps(a, _mm512_add_ps(_mm512_loadu_ps(a), _mm512_load_ps(sum_k + key * width + w)));
              _mm512_storeu_ps(b, _mm512_add_ps(_mm512_loadu_ps(b), _mm512_load_ps(sum_v + key * width + w)));
            }
        };
        for (int64_t p = offset[r]; p < offset[r + 1]; p++) add(piece_start[p], piece_length[p]);
        add(start[r], keys - key);
      }
    }
    release_tiles();
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t c = 0; c < key_heads * width; c += 16) {
        __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
        for (int id = 0; id < threads; id++) {
          a = _mm512_add_ps(a, _mm512_loadu_ps(work + 2 * all * id + t * key_heads * width + c));
          b = _mm512_add_ps(b, _mm512_loadu_ps(work + 2 * all * id + all + t * key_heads * width + c));
        }
        store16(by_k + t * by_k_step + c, a);
        store16(by_v + t * by_v_step + c, b);
      }
  }
}

}  // extern "C"
