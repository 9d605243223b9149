/* Chains of cheap operations as one pass over memory each, on CPUs. Compiled for one type of
   numbers: 32 bits, or with -DBF16 those of 16 bits (bfloat16).

   Everything is computed in 32 bits, and a result is rounded once. Rows lie `..._step` numbers
   apart and are dense in themselves; results are dense. The formulas stand beside the eager twins,
   which have the same names in Python. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef BF16
typedef uint16_t number;

static inline float load(number stored) {
    uint32_t bits = (uint32_t)stored << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, to even where two are as near; not-a-number stays one. */
static inline number rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (number)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}
#else
typedef float number;

static inline float load(number stored) { return stored; }
static inline number rounded(float value) { return value; }
#endif

typedef int64_t count;

#define EACH_ROW _Pragma("omp parallel for num_threads(threads) if (rows * width > 65536)")
#define LANES _Pragma("omp simd")
#define SUM(name) _Pragma(SUM_(omp simd reduction(+ : name)))
#define SUM_(words) #words
#define BOTH_SUMS(one, other) _Pragma(SUM_(omp simd reduction(+ : one, other)))
#define LARGEST(name) _Pragma(SUM_(omp simd reduction(max : name)))

/* e^x to 2 units in the last place: 2^n e^r with |r| <= log(2) / 2, and a polynomial for e^r. */
static inline float exponential(float x) {
    float kept = x > 88.0f ? 88.0f : (x < -87.0f ? -87.0f : x);
    float n = (kept * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t exponent = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &exponent, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

void normed(const number *x, count x_step, const float *weight, number *result, float *inverse,
            count rows, count width, float eps, int gemma, int threads) {
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        const number *from = x + row * x_step;
        number *to = result + row * width;
        float sum = 0;
        SUM(sum)
        for (count i = 0; i < width; i++) sum += load(from[i]) * load(from[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        inverse[row] = scale;
        if (gemma) {
            LANES
            for (count i = 0; i < width; i++)
                to[i] = rounded(load(from[i]) * scale * (1.0f + weight[i]));
        } else {
            LANES
            for (count i = 0; i < width; i++)
                to[i] = rounded(weight[i] * load(rounded(load(from[i]) * scale)));
        }
    }
}

void norm_gradients(const number *x, count x_step, const number *grad, count grad_step,
                    const float *inverse, const float *weight, number *by_x, count rows,
                    count width, int gemma, int threads) {
    float one = gemma ? 1.0f : 0.0f;
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        const number *from = x + row * x_step, *given = grad + row * grad_step;
        number *to = by_x + row * width;
        float scale = inverse[row], sum = 0;
        SUM(sum)
        for (count i = 0; i < width; i++)
            sum += load(given[i]) * (one + weight[i]) * (load(from[i]) * scale);
        float mean = sum / (float)width;
        LANES
        for (count i = 0; i < width; i++)
            to[i] = rounded(
                scale * (load(given[i]) * (one + weight[i]) - load(from[i]) * scale * mean));
    }
}

/* A row has all heads of a place; the tables have a row for each place. */
void rotated(const number *x, count x_step, const float *cos, const float *sines, number *result,
             count rows, count heads, count width, int threads) {
    count half = width / 2;
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        const float *c = cos + row * width, *s = sines + row * width;
        for (count head = 0; head < heads; head++) {
            const number *from = x + row * x_step + head * width;
            number *to = result + (row * heads + head) * width;
            LANES
            for (count i = 0; i < half; i++) {
                float first = load(from[i]), second = load(from[i + half]);
                to[i] = rounded(first * c[i] + second * s[i]);
                to[i + half] = rounded(second * c[i + half] + first * s[i + half]);
            }
        }
    }
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* GELU with tanh is x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3); this is 2 u. */
static inline float bent(float x) { return 1.595769122f * (x + 0.044715f * x * x * x); }
static inline float slope_of_bent(float x) { return 1.595769122f * (1.0f + 0.134145f * x * x); }

void gated(const number *gate, count gate_step, const number *up, count up_step, number *result,
           count rows, count width, int tanh, int threads) {
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        const number *g = gate + row * gate_step, *u = up + row * up_step;
        number *to = result + row * width;
        LANES
        for (count i = 0; i < width; i++) {
            float x = load(g[i]);
            to[i] = rounded(x * sigmoid(tanh ? bent(x) : x) * load(u[i]));
        }
    }
}

void gated_gradients(const number *gate, count gate_step, const number *up, count up_step,
                     const number *grad, count grad_step, number *by_gate, number *by_up,
                     count rows, count width, int tanh, int threads) {
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        const number *g = gate + row * gate_step, *u = up + row * up_step;
        const number *d = grad + row * grad_step;
        number *of_gate = by_gate + row * width, *of_up = by_up + row * width;
        LANES
        for (count i = 0; i < width; i++) {
            float x = load(g[i]), given = load(d[i]);
            float share = sigmoid(tanh ? bent(x) : x);
            float slope = x * (1.0f - share) * (tanh ? slope_of_bent(x) : 1.0f);
            of_gate[i] = rounded(given * load(u[i]) * share * (1.0f + slope));
            of_up[i] = rounded(given * x * share);
        }
    }
}

#define VECTOR 16
#define WHOLE(width) (((width) + VECTOR - 1) / VECTOR * VECTOR)

/* -inf after a row, up to a whole vector; returns the width with them. */
static inline count filled(float *z, count width) {
    count whole = WHOLE(width);
    for (count i = width; i < whole; i++) z[i] = -INFINITY;
    return whole;
}

/* e^(scale (z - max z)) in place of z; returns their sum, and max z. */
static inline float powers(float *z, count whole, float scale, float *largest) {
    float top = -INFINITY, sum = 0;
    LARGEST(top)
    for (count i = 0; i < whole; i++) top = z[i] > top ? z[i] : top;
    SUM(sum)
    for (count i = 0; i < whole; i++) {
        float power = exponential(scale * (z[i] - top));
        z[i] = power;
        sum += power;
    }
    *largest = top;
    return sum;
}

/* `powers` with a scale of 1; `mean` is the mean of z - max z, each weighted with its power. */
static inline float powers_and_mean(float *z, count whole, float *largest, float *mean) {
    float top = -INFINITY, sum = 0, product = 0;
    LARGEST(top)
    for (count i = 0; i < whole; i++) top = z[i] > top ? z[i] : top;
    BOTH_SUMS(sum, product)
    for (count i = 0; i < whole; i++) {
        float below = z[i] - top, power = exponential(below);
        z[i] = power;
        sum += power;
        product += below < -87.0f ? 0.0f : power * below;
    }
    *largest = top;
    *mean = product / sum;
    return sum;
}

/* cap tanh(z / cap). */
static inline float capped(float z, float cap) {
    return cap * (2.0f * sigmoid(2.0f * z / cap) - 1.0f);
}

/* The loss of each row goes to `losses`, the entropy of its shares to `entropies` unless that is
   missing, and the gradient of the loss to `logits` where it is wanted. `room` has WHOLE(width)
   numbers for each thread; `bias` may be missing, and a cap of 0 is none. */
void tile_loss(number *logits, count logits_step, const int64_t *targets, const float *bias,
               float *losses, float *entropies, float *room, count rows, count width, float scale,
               float cap, int wanted, int threads) {
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        number *z = logits + row * logits_step;
        float *wide = room + omp_get_thread_num() * WHOLE(width), top, mean, sum;
        LANES
        for (count i = 0; i < width; i++) wide[i] = scale * load(z[i]);
        if (bias) {
            LANES
            for (count i = 0; i < width; i++) wide[i] += scale * bias[i];
        }
        if (cap) {
            LANES
            for (count i = 0; i < width; i++) wide[i] = capped(wide[i], cap);
        }
        float at = wide[targets[row]];
        float slope_at = scale * (cap ? 1.0f - at / cap * (at / cap) : 1.0f);
        count whole = filled(wide, width);
        if (entropies) {
            sum = powers_and_mean(wide, whole, &top, &mean);
            entropies[row] = logf(sum) - mean;
        } else {
            sum = powers(wide, whole, 1.0f, &top);
        }
        float of_target = at - top - logf(sum), share = scale / sum;
        losses[row] = -of_target;
        if (!wanted) continue;
        if (cap) {
            LANES
            for (count i = 0; i < width; i++) {
                float t = capped(scale * (load(z[i]) + (bias ? bias[i] : 0.0f)), cap) / cap;
                wide[i] *= 1.0f - t * t;
            }
        }
        LANES
        for (count i = 0; i < width; i++) z[i] = rounded(share * wide[i]);
        /* Exact where the share is near 1. */
        z[targets[row]] = rounded(slope_at * expm1f(of_target));
    }
}

/* Scores of a document's last tokens, (rows / groups) of `width`, and in `grads` the gradients of
   their shares: in place of these, the shares P = softmax(scale S) and the gradients of the scores,
   P (G - sum P G). A token sees those up to itself. `logs` are the logarithms of the sums of
   e^(scale S) as they were before S was rounded. `room` is as that of `tile_loss`. */
void share_gradients(number *scores, number *grads, const float *logs, float *room, count matrices,
                     count rows, count width, count groups, float scale, int threads) {
    count first = width - rows / groups, per_matrix = rows;
    rows *= matrices;
    EACH_ROW
    for (count row = 0; row < rows; row++) {
        number *z = scores + row * width, *g = grads + row * width;
        count seen = first + row % per_matrix / groups + 1;
        float *wide = room + omp_get_thread_num() * WHOLE(width), sum = 0, product = 0;
        BOTH_SUMS(sum, product)
        for (count i = 0; i < seen; i++) {
            float power = exponential(scale * load(z[i]) - logs[row]);
            wide[i] = power;
            sum += power;
            product += power * load(g[i]);
        }
        float whole = 1.0f / sum, mean = product * whole;
        LANES
        for (count i = 0; i < seen; i++) {
            float share = whole * wide[i];
            z[i] = rounded(share);
            g[i] = rounded(share * (load(g[i]) - mean));
        }
        for (count i = seen; i < width; i++) z[i] = g[i] = 0;
    }
}
