/* Gradients of adapters, in bfloat16 on CPUs with AMX: of a matrix W as wide as the model and of
   matrices as narrow as an adapter's rank

       P = W U        S = N^T W

   with W (tokens, wide), N and P (tokens, narrow), U (wide, narrow) and S (narrow, wide). W is read
   from memory once: what is left to do for both products lies in the caches. S is summed in 32 bits
   and rounded once. */

#include "tiles.h"

#ifdef AMX

#define ROWS 64 /* tokens that are taken at once */

/* P of so many tokens, 16 columns of it: four squares of 16 tokens. */
static void multiply(given w, const number *u, count u_step, count deep, float *to) {
    no_sums();
    SETTLED;
    EACH(k, 0, deep) {
        const number *a = w.first + 32 * k;
        _tile_loadd(7, u + k * u_step, 64);
        _tile_loadd(4, a, 2 * w.step);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, a + 16 * w.step, 2 * w.step);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(4, a + 32 * w.step, 2 * w.step);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, a + 48 * w.step, 2 * w.step);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(to, 2 * SQUARE);
    SETTLED;
}

/* Adds to S what so many tokens give. Of N^T are given tiles; S lies in pairs of squares, of which
   the first has numbers 0 to 3, 8 to 11, 16 to 19 and 24 to 27 of 32 columns: so two rows of W
   become pairs by one instruction each. */
static void add_outer(given w, count deep, const number *n_turned, count narrow, float *s) {
    number pairs[ROWS / BLOCK][2 * TILE] __attribute__((aligned(64)));
    EACH(panel, 0, deep) {
        EACH(block, 0, ROWS / BLOCK) EACH(i, 0, 16) {
            const number *row = w.first + (BLOCK * block + 2 * i) * w.step + 32 * panel;
            __m512i one = _mm512_loadu_si512(row), two = _mm512_loadu_si512(row + w.step);
            _mm512_store_si512(pairs[block] + 32 * i, _mm512_unpacklo_epi16(one, two));
            _mm512_store_si512(pairs[block] + TILE + 32 * i, _mm512_unpackhi_epi16(one, two));
        }
        SETTLED;
        EACH(tile, 0, narrow) {
            float *sums = s + (tile * deep + panel) * 2 * SQUARE;
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + SQUARE, 64);
            EACH(block, 0, ROWS / BLOCK) {
                _tile_loadd(4, n_turned + (block * narrow + tile) * TILE, 64);
                _tile_loadd(6, pairs[block], 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, pairs[block] + TILE, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, sums, 64);
            _tile_stored(1, sums + SQUARE, 64);
        }
    }
}

/* A row of S of 32 columns, summed over threads, in the order of columns. */
static void put_row(const float *s, count apart, count threads, number *to) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 first = _mm512_setzero_ps(), second = first;
    EACH(thread, 0, threads) {
        first = _mm512_add_ps(first, _mm512_loadu_ps(s + thread * apart));
        second = _mm512_add_ps(second, _mm512_loadu_ps(s + thread * apart + SQUARE));
    }
    store_rounded(to, 16, _mm512_permutex2var_ps(first, low, second));
    store_rounded(to + 16, 16, _mm512_permutex2var_ps(first, high, second));
}

/* Numbers of 16 bits that each thread needs besides its sums, and all of them together. */
count room_of_thread(count wide, count narrow) { return ROWS * (wide + narrow); }
count room_of_all(count wide, count narrow) { return wide * narrow; }

/* `wide` is a multiple of 32 and `narrow` of 16. Without `u` there is no P. */
void adapter_gradients(const number *w, count w_step, const number *n, count n_step,
                       const number *u, number *p, number *s, count tokens, count wide,
                       count narrow, float *sums, number *room, int threads) {
    count deep = wide / 32, tiles = narrow / 16;
    number *u_laid = room, *of_threads = room + room_of_all(wide, narrow);
    if (u) lay_pairs((given){u, narrow, narrow}, wide, deep, narrow, 0, u_laid);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char before[64];
        begin_tiles(before);
        float *own = sums + omp_get_thread_num() * narrow * wide;
        number *n_turned = of_threads + omp_get_thread_num() * room_of_thread(wide, narrow);
        number *copy = n_turned + ROWS * narrow;
        memset(own, 0, narrow * wide * sizeof(float));
#pragma omp for schedule(static)
        for (count first = 0; first < tokens; first += ROWS) {
            count some = less(ROWS, tokens - first);
            given rows = {w + first * w_step, w_step, wide};
            if (some < ROWS) { /* 0 after the last */
                EACH(i, 0, some) memcpy(copy + i * wide, rows.first + i * w_step, 2 * wide);
                memset(copy + some * wide, 0, 2 * (ROWS - some) * wide);
                rows = (given){copy, wide, wide};
            }
            if (u) EACH(tile, 0, tiles) {
                float squares[4 * SQUARE] __attribute__((aligned(64)));
                multiply(rows, u_laid + tile * TILE, tiles * TILE, deep, squares);
                EACH(i, 0, some)
                    store_rounded(p + (first + i) * narrow + 16 * tile, 16,
                                  _mm512_load_ps(squares + 16 * i));
            }
            given of_rows = {n + first * n_step, n_step, narrow};
            lay_pairs(of_rows, some, ROWS / BLOCK, narrow, 1, n_turned);
            add_outer(rows, deep, n_turned, tiles, own);
        }
        end_tiles(before);
#pragma omp for schedule(static)
        for (count row = 0; row < narrow; row++) EACH(panel, 0, deep) {
            const float *from = sums + ((row / 16 * deep + panel) * 2) * SQUARE + row % 16 * 16;
            put_row(from, narrow * wide, omp_get_num_threads(), s + row * wide + 32 * panel);
        }
    }
}

#endif
