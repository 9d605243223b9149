/* Causal attention of documents side by side, forward and backward, in bfloat16 on CPUs with AMX
   or with AVX-512 for bfloat16.

       S = scale Q K^T        P = softmax(S)         O = P V         D_i = sum_d dO_id O_id
       dV = P^T dO            dS = P (dO V^T - D)    dQ = scale dS K     dK = scale dS^T Q

   Where scores are capped, softmax is of S' = cap tanh(S / cap), and dS = dS' (1 - (S' / cap)^2).

   A tile of scores goes from its product through softmax to the next product within the caches, and
   tiles above the diagonal or behind a window are not computed. Scores, sums and gradients that are
   added up are in 32 bits; what a product reads is rounded to 16. Tokens are taken by the block of
   32 and numbers of a head by 32, and what lacks in the last of these is 0. */

#include "tiles.h"

#ifdef TILES

#include <math.h>

#define TALL 8          /* blocks of queries whose scores are there at once */
#define WIDE 16         /* blocks of keys of these */
#define LEAST -87.0f    /* e^x below it is that of it */

/* e^x to 2 units in the last place: 2^n e^r with |r| <= log(2) / 2, and a polynomial for e^r. */
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(LEAST), x); /* the second where one is not a number */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* X as A: tile after tile of 16 tokens. */
static void lay_rows(given x, count length, count blocks, count size, number *to) {
    EACH(first, 0, 2 * blocks) for (count at = 0; at < size; at += 32, to += TILE)
        EACH(i, 0, 16) _mm512_storeu_si512(to + 32 * i, numbers(x, length, 16 * first + i, at));
}

/* X^T as B: tile after tile of 16 tokens. */
static void lay_turned(given x, count length, count blocks, count size, number *to) {
    __m512i rows[16];
    EACH(first, 0, 2 * blocks) for (count at = 0; at < size; at += 32, to += TILE) {
        EACH(i, 0, 16) rows[i] = numbers(x, length, 16 * first + i, at);
        turn(rows);
        EACH(i, 0, 16) _mm512_storeu_si512(to + 32 * i, rows[i]);
    }
}

/* How scores become weights: the tokens that a token sees, itself the last of them; the factor of
   scores; where it is not 0, what none of them exceeds. */
typedef struct {
    count window;
    float scale, cap;
} rule;

/* Which 16 keys from `key` on a query sees: the window ends with its own. */
static inline __mmask16 seen(count query, count key, count window) {
    count behind = query - key + 1;
    return first_of_16(behind) & ~first_of_16(behind - window);
}

/* Whether queries of a block see only a part of the block of keys so many blocks before. */
static inline int in_part(count before, count window) {
    return before == 0 || before >= window / BLOCK;
}

/* The first block of keys that a block of queries sees, and the last block of queries that sees one
   of keys. */
static inline count first_key(count block, count window) {
    return block * BLOCK < window ? 0 : (block * BLOCK - window + 1) / BLOCK;
}

static inline count last_query(count block, count window) {
    return (block * BLOCK + BLOCK - 2 + window) / BLOCK;
}

/* Numbers that are taken for a head of so many. */
static inline count filled(count width) { return (width + 31) / 32 * 32; }

/* Numbers of 16 bits that `forward` and `backward` need for each thread. */
count room_of_forward(count longest, count width) {
    count blocks = (longest + BLOCK - 1) / BLOCK, size = filled(width);
    return 3 * blocks * BLOCK * size + 2 * (WIDE * 4 * SQUARE + BLOCK * size) + 2 * WIDE * TILE;
}

count room_of_backward(count longest, count width) {
    count blocks = (longest + BLOCK - 1) / BLOCK, size = filled(width);
    count laid = blocks * BLOCK * size;
    return 7 * laid + 2 * (2 * laid + TALL * BLOCK * size + 2 * blocks * BLOCK) +
           3 * TALL * WIDE * 2 * TILE;
}

/* Forward -------------------------------------------------------------------------------------- */

/* Scores of 32 queries and so many blocks of keys: four squares each, two for 16 queries. */
static inline void scores(const number *queries, const number *keys, count blocks, count size,
                          float *to) {
    count deep = size / 32;
    EACH(block, 0, blocks) {
        multiply_tiles(to, 2 * SQUARE, 0, queries, deep * TILE, TILE, keys, deep * TILE, TILE,
                       deep);
        keys += 2 * deep * TILE;
        to += 4 * SQUARE;
    }
}

/* They become scores that are capped, without their factor: tanh(x) = 1 - 2 / (e^2x + 1). */
static void cap_scores(float *square, count blocks, rule how) {
    __m512 given = _mm512_set1_ps(2.0f * how.scale / how.cap), one = _mm512_set1_ps(1.0f);
    __m512 widest = _mm512_set1_ps(how.cap / how.scale);
    for (float *at = square; at < square + blocks * 4 * SQUARE; at += 16) {
        __m512 power = exponential(_mm512_mul_ps(given, _mm512_loadu_ps(at)));
        __m512 less = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one));
        _mm512_storeu_ps(at, _mm512_mul_ps(widest, _mm512_sub_ps(one, less)));
    }
}

/* A query's weights of keys in blocks, the first of them `back` blocks before its own, as A. Its
   largest score so far and the sum of e^(scale S - largest) are renewed; returns by what earlier
   sums are to be multiplied. */
static inline float weigh(const float *row, number *to, count blocks, count back, count place,
                          rule how, float *largest, float *sum) {
    __m512 none = _mm512_set1_ps(-INFINITY), top = none, total = _mm512_setzero_ps();
    count query = place + back * BLOCK; /* from the first of these keys on */
    EACH(block, 0, blocks) EACH(half, 0, 2) {
        __m512 score = _mm512_loadu_ps(row + (4 * block + half) * SQUARE);
        if (in_part(back - block, how.window)) {
            __mmask16 those = seen(query, block * BLOCK + 16 * half, how.window);
            score = _mm512_mask_mov_ps(none, those, score);
        }
        top = _mm512_max_ps(top, score);
    }
    float before = *largest, now = how.scale * _mm512_reduce_max_ps(top);
    if (now < before) now = before;
    __m512 wide = _mm512_set1_ps(how.scale), less = _mm512_set1_ps(now);
    EACH(block, 0, blocks) {
        __m512 weights[2];
        EACH(half, 0, 2) {
            __m512 score = _mm512_loadu_ps(row + (4 * block + half) * SQUARE);
            weights[half] = exponential(_mm512_fmsub_ps(wide, score, less));
            if (in_part(back - block, how.window)) {
                __mmask16 those = seen(query, block * BLOCK + 16 * half, how.window);
                weights[half] = _mm512_maskz_mov_ps(those, weights[half]);
            }
            total = _mm512_add_ps(total, weights[half]);
        }
        __m512bh both = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
        _mm512_storeu_si512(to + block * TILE, (__m512i)both);
    }
    float kept = before == -INFINITY ? 0.0f : expf(before - now);
    *sum = kept * *sum + _mm512_reduce_add_ps(total);
    *largest = now;
    return kept;
}

/* One document, one key head and the query heads that share it. */
static void forward_one(given query, given key, given value, number *result, count result_step,
                        float *logs, count logs_step, count length, count groups, rule how,
                        number *room) {
    count blocks = (length + BLOCK - 1) / BLOCK, width = key.width, size = filled(width);
    count laid = blocks * BLOCK * size, tiles = size / 16;
    number *keys = room, *values = keys + laid, *queries = values + laid, *weights = queries + laid;
    float *square = (float *)(weights + 2 * WIDE * TILE), *mixed = square + WIDE * 4 * SQUARE;
    lay_turned(key, length, blocks, size, keys);
    lay_pairs(value, length, blocks, size, 0, values);
    EACH(head, 0, groups) {
        given own = {query.first + head * width, query.step, width};
        lay_rows(own, length, blocks, size, queries);
        EACH(block, 0, blocks) {
            float largest[BLOCK], sum[BLOCK];
            EACH(i, 0, BLOCK) largest[i] = -INFINITY, sum[i] = 0.0f;
            memset(mixed, 0, BLOCK * size * sizeof *mixed);
            count begin = first_key(block, how.window);
            for (count first = begin; first <= block; first += WIDE) {
                count some = less(WIDE, block + 1 - first);
                scores(queries + block * BLOCK * size, keys + first * BLOCK * size, some, size,
                       square);
                if (how.cap) cap_scores(square, some, how);
                EACH(i, 0, BLOCK) {
                    float *row = square + i / 16 * 2 * SQUARE + i % 16 * 16;
                    float kept = weigh(row, weights + i / 16 * WIDE * TILE + i % 16 * 32, some,
                                       block - first, i, how, largest + i, sum + i);
                    if (first > begin) EACH(tile, 0, tiles) {
                        float *at = mixed + (i / 16 * tiles + tile) * SQUARE + i % 16 * 16;
                        EACH(d, 0, 16) at[d] *= kept;
                    }
                }
                EACH_PAIR(tile, tiles) {
                    multiply_tiles(mixed + tile * SQUARE, tiles * SQUARE, 1, weights, WIDE * TILE,
                                   TILE, values + (first * tiles + tile) * TILE, TILE, tiles * TILE,
                                   some);
                }
            }
            EACH(i, 0, less(BLOCK, length - block * BLOCK)) {
                count token = block * BLOCK + i;
                logs[head * logs_step + token] = largest[i] + logf(sum[i]);
                __m512 share = _mm512_set1_ps(1.0f / sum[i]);
                EACH(tile, 0, tiles) {
                    float *at = mixed + (i / 16 * tiles + tile) * SQUARE + i % 16 * 16;
                    store_rounded(result + token * result_step + head * width + tile * 16,
                                  width - tile * 16,
                                  _mm512_mul_ps(share, _mm512_loadu_ps(at)));
                }
            }
        }
    }
}

/* A document and a key head, with the query heads that share it: the first token, how many there
   are, where in a token these heads begin, and the rule for it. */
typedef struct {
    count start, length, narrow, broad;
    rule how;
} work;

/* A window of 0 is none, and one as long as all blocks leaves none of them seen in part. */
static inline work work_of(const int64_t *ends, count one, count key_heads, count groups,
                           count width, rule how) {
    count start = ends[one / key_heads], at = one % key_heads * width;
    count length = ends[one / key_heads + 1] - start;
    if (!how.window || how.window >= length) how.window = (length + BLOCK - 1) / BLOCK * BLOCK;
    return (work){start, length, at, groups * at, how};
}

static inline given heads_at(const number *x, count step, count start, count at, count width) {
    return (given){x + start * step + at, step, width};
}

/* Documents end where `ends` says, of which the first is 0, and `window` and `cap` are 0 for
   none. The numbers of a head lie side by side,
   heads one after another, and tokens `..._step` numbers apart. `room` has `room_each` numbers for
   each thread. */
void attention(const number *query, count query_step, const number *key, count key_step,
               const number *value, count value_step, number *result, count result_step,
               float *logs, const int64_t *ends, count documents, count key_heads, count groups,
               count width, count window, float scale, float cap, number *room,
               count room_each, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char before[64];
        begin_tiles(before);
#pragma omp for schedule(dynamic)
        for (count one = 0; one < documents * key_heads; one++) {
            work own = work_of(ends, one, key_heads, groups, width,
                               (rule){window, scale, cap});
            forward_one(heads_at(query, query_step, own.start, own.broad, width),
                        heads_at(key, key_step, own.start, own.narrow, width),
                        heads_at(value, value_step, own.start, own.narrow, width),
                        result + own.start * result_step + own.broad, result_step,
                        logs + own.broad / width * ends[documents] + own.start, ends[documents],
                        own.length, groups, own.how,
                        room + omp_get_thread_num() * room_each);
        }
        end_tiles(before);
    }
}

/* Backward ------------------------------------------------------------------------------------- */

/* P and dS of 32 queries and 32 keys: P and dS as B, dS also as A, whose second row of tiles lies
   `down` numbers after the first; the keys' block is `back` blocks before the queries'. Both have
   squares as `scores` makes them. */
static inline void differentiate(const float *square, const float *by_weights, const float *logs,
                                 const float *means, count back, rule how,
                                 number *weights, number *pairs, number *rows, count down) {
    const __m512i mixed =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 wide = _mm512_set1_ps(how.scale), one = _mm512_set1_ps(1.0f);
    __m512 share = how.cap ? _mm512_set1_ps(how.scale / how.cap) : _mm512_setzero_ps();
    EACH_PAIR(i, BLOCK) {
        __m512 of_scores[2][2], power[2][2];
        EACH(next, 0, 2) {
            __m512 log = _mm512_set1_ps(logs[i + next]), mean = _mm512_set1_ps(means[i + next]);
            EACH(half, 0, 2) {
                count at = (i / 16 * 2 + half) * SQUARE + (i + next) % 16 * 16;
                __m512 score = _mm512_loadu_ps(square + at);
                __m512 by_weight = _mm512_loadu_ps(by_weights + at);
                __m512 weight = exponential(_mm512_fmsub_ps(wide, score, log));
                if (in_part(back, how.window)) {
                    __mmask16 those = seen(i + next + back * BLOCK, 16 * half, how.window);
                    weight = _mm512_maskz_mov_ps(those, weight);
                }
                power[half][next] = weight;
                of_scores[half][next] = _mm512_mul_ps(weight, _mm512_sub_ps(by_weight, mean));
                if (how.cap) {
                    __m512 of_cap = _mm512_mul_ps(share, score);
                    __m512 slope = _mm512_fnmadd_ps(of_cap, of_cap, one);
                    of_scores[half][next] = _mm512_mul_ps(slope, of_scores[half][next]);
                }
            }
            __m512bh row = _mm512_cvtne2ps_pbh(of_scores[1][next], of_scores[0][next]);
            _mm512_storeu_si512(rows + i / 16 * down + (i + next) % 16 * 32, (__m512i)row);
        }
        EACH(half, 0, 2) {
            __m512i of_weight = (__m512i)_mm512_cvtne2ps_pbh(power[half][1], power[half][0]);
            __m512i of_score = (__m512i)_mm512_cvtne2ps_pbh(of_scores[half][1], of_scores[half][0]);
            count at = half * TILE + i / 2 * 32;
            _mm512_storeu_si512(weights + at, _mm512_permutexvar_epi16(mixed, of_weight));
            _mm512_storeu_si512(pairs + at, _mm512_permutexvar_epi16(mixed, of_score));
        }
    }
}

/* D of each query, sum_d dO_id O_id. */
static void dots(given mixed, given grad, count length, float *to) {
    EACH(token, 0, length) {
        __m512 sum = _mm512_setzero_ps();
        for (count at = 0; at < grad.width; at += 16) {
            count some = grad.width - at;
            sum = _mm512_fmadd_ps(widened(mixed.first + token * mixed.step + at, some),
                                  widened(grad.first + token * grad.step + at, some), sum);
        }
        to[token] = _mm512_reduce_add_ps(sum);
    }
}

/* Sums of X^T, squares of 16 numbers by 16 tokens, to rows of tokens. */
static void put_turned(const float *from, count length, count blocks, count width, float scale,
                       number *to, count step) {
    __m512i rows[16];
    for (count at = 0; at < width; at += 16)
        for (count first = 0; first < BLOCK * blocks; first += 16, from += SQUARE) {
            EACH(i, 0, 16) rows[i] = _mm512_loadu_si512(from + 16 * i);
            turn(rows);
            EACH(i, 0, less(16, length - first))
                store_rounded(to + (first + i) * step + at, width - at,
                              _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_castsi512_ps(rows[i])));
        }
}

static void backward_one(given query, given key, given value, given mixed, given grad,
                         const float *logs, count logs_step, number *by_query, count by_query_step,
                         number *by_key, number *by_value, count by_key_step, count length,
                         count groups, rule how, number *room) {
    count blocks = (length + BLOCK - 1) / BLOCK, width = key.width, size = filled(width);
    count laid = blocks * BLOCK * size, tiles = size / 16;
    number *keys = room, *values = keys + laid, *key_pairs = values + laid;
    number *queries = key_pairs + laid, *grads = queries + laid;
    number *queries_turned = grads + laid, *grads_turned = queries_turned + laid;
    number *weights = grads_turned + laid, *pairs = weights + TALL * WIDE * 2 * TILE;
    number *rows = pairs + TALL * WIDE * 2 * TILE;
    float *of_key = (float *)(rows + TALL * WIDE * 2 * TILE), *of_value = of_key + laid;
    float *of_query = of_value + laid, *of_logs = of_query + TALL * BLOCK * size;
    float *means = of_logs + blocks * BLOCK, square[4 * SQUARE], by_weights[4 * SQUARE];
    lay_turned(key, length, blocks, size, keys);
    lay_turned(value, length, blocks, size, values);
    lay_pairs(key, length, blocks, size, 0, key_pairs);
    memset(of_key, 0, 2 * laid * sizeof *of_key);
    EACH(head, 0, groups) {
        given own = {query.first + head * width, query.step, width};
        given of_own = {grad.first + head * width, grad.step, width};
        lay_rows(own, length, blocks, size, queries);
        lay_rows(of_own, length, blocks, size, grads);
        lay_pairs(own, length, blocks, size, 1, queries_turned);
        lay_pairs(of_own, length, blocks, size, 1, grads_turned);
        memcpy(of_logs, logs + head * logs_step, length * sizeof *logs);
        dots((given){mixed.first + head * width, mixed.step, width}, of_own, length, means);
        EACH(token, length, blocks * BLOCK) of_logs[token] = means[token] = 0.0f;
        for (count top = 0; top < blocks; top += TALL) {
            count low = less(blocks, top + TALL);
            memset(of_query, 0, (low - top) * BLOCK * size * sizeof *of_query);
            for (count left = first_key(top, how.window); left < low; left += WIDE) {
                count right = less(low, left + WIDE);
                EACH(block, top, low)
                EACH(other, more(left, first_key(block, how.window)), less(right, block + 1)) {
                    count tall = block - top, wide = other - left;
                    count at = (tall * WIDE + wide) * 2 * TILE;
                    scores(queries + block * BLOCK * size, keys + other * BLOCK * size, 1, size,
                           square);
                    if (how.cap) cap_scores(square, 1, how);
                    scores(grads + block * BLOCK * size, values + other * BLOCK * size, 1, size,
                           by_weights);
                    differentiate(square, by_weights, of_logs + block * BLOCK,
                                  means + block * BLOCK, block - other, how, weights + at,
                                  pairs + at, rows + (2 * tall * WIDE + wide) * TILE, WIDE * TILE);
                }
                EACH(block, top, low) {
                    count first = more(left, first_key(block, how.window));
                    count some = less(right, block + 1) - first;
                    const number *of_scores =
                        rows + ((block - top) * 2 * WIDE + first - left) * TILE;
                    if (some > 0) EACH_PAIR(tile, tiles) {
                        float *sums = of_query + ((block - top) * 2 * tiles + tile) * SQUARE;
                        multiply_tiles(sums, tiles * SQUARE, 1, of_scores, WIDE * TILE, TILE,
                                       key_pairs + (first * tiles + tile) * TILE, TILE,
                                       tiles * TILE, some);
                    }
                }
                EACH(other, left, right) {
                    count first = more(other, top);
                    count some = less(low, last_query(other, how.window) + 1) - first;
                    count at = ((first - top) * WIDE + other - left) * 2 * TILE;
                    EACH_PAIR(tile, tiles) {
                        count sums = (tile * blocks + other) * 2 * SQUARE;
                        count turned = (first * tiles + tile) * TILE;
                        multiply_tiles(of_key + sums, blocks * 2 * SQUARE, 1,
                                       queries_turned + turned, TILE, tiles * TILE, pairs + at,
                                       TILE, WIDE * 2 * TILE, some);
                        multiply_tiles(of_value + sums, blocks * 2 * SQUARE, 1,
                                       grads_turned + turned, TILE, tiles * TILE, weights + at,
                                       TILE, WIDE * 2 * TILE, some);
                    }
                }
            }
            EACH(token, top * BLOCK, less(length, low * BLOCK)) EACH(tile, 0, tiles) {
                count i = token - top * BLOCK;
                const float *sums = of_query + (i / 16 * tiles + tile) * SQUARE + i % 16 * 16;
                store_rounded(by_query + token * by_query_step + head * width + tile * 16,
                              width - tile * 16,
                              _mm512_mul_ps(_mm512_set1_ps(how.scale), _mm512_loadu_ps(sums)));
            }
        }
    }
    put_turned(of_key, length, blocks, width, how.scale, by_key, by_key_step);
    put_turned(of_value, length, blocks, width, 1.0f, by_value, by_key_step);
}

/* As `attention`, whose result and logarithms are given. */
void attention_gradients(const number *query, count query_step, const number *key, count key_step,
                         const number *value, count value_step, const number *mixed,
                         count mixed_step, const number *grad, count grad_step, const float *logs,
                         number *by_query, number *by_key, number *by_value, const int64_t *ends,
                         count documents, count key_heads, count groups, count width,
                         count window, float scale, float cap, number *room, count room_each,
                         int threads) {
    count narrow = key_heads * width, broad = groups * narrow;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char before[64];
        begin_tiles(before);
#pragma omp for schedule(dynamic)
        for (count one = 0; one < documents * key_heads; one++) {
            work own = work_of(ends, one, key_heads, groups, width,
                               (rule){window, scale, cap});
            count by_head = own.start * narrow + own.narrow;
            backward_one(heads_at(query, query_step, own.start, own.broad, width),
                         heads_at(key, key_step, own.start, own.narrow, width),
                         heads_at(value, value_step, own.start, own.narrow, width),
                         heads_at(mixed, mixed_step, own.start, own.broad, width),
                         heads_at(grad, grad_step, own.start, own.broad, width),
                         logs + own.broad / width * ends[documents] + own.start, ends[documents],
                         by_query + own.start * broad + own.broad, broad, by_key + by_head,
                         by_value + by_head, narrow, own.length, groups, own.how,
                         room + omp_get_thread_num() * room_each);
        }
        end_tiles(before);
    }
}

#endif
