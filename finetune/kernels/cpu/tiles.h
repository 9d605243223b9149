/* Tiles of bfloat16: such are those of a product C += A B.

       A    16 rows of 32 numbers
       B    32 rows of 16 numbers, of which each two lie side by side: 16 rows of 16 pairs
       C    16 rows of 16 numbers of 32 bits, a square

   A CPU with AMX has them, and another with AVX-512 makes their products of pairs in registers.
   TILES is defined where the compiler is for either, and AMX where it is for that. */

/* Where this process multiplies tiles. */
enum { NOWHERE, IN_REGISTERS, IN_TILES };
int tiles_of_this_process(void);

#if defined(__linux__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#define TILES

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef int64_t count;
typedef uint16_t number;

/* Rows of a matrix, a token each: where the first begins, numbers from row to row, and how many of
   them there are: what is read after these is 0. */
typedef struct {
    const number *first;
    count step, width;
} given;

#define BLOCK 32        /* tokens */
#define TILE 512        /* numbers of 16 bits */
#define SQUARE 256      /* numbers of 32 bits */
#define EACH(name, from, to) for (count name = (from); name < (to); name++)
#define EACH_PAIR(name, to) for (count name = 0; name < (to); name += 2)

static inline count less(count one, count other) { return one < other ? one : other; }
static inline count more(count one, count other) { return one > other ? one : other; }

/* So many of 16, and of 32. */
static inline __mmask16 first_of_16(count some) {
    return some >= 16 ? 0xffff : some <= 0 ? 0 : (__mmask16)((1 << some) - 1);
}

static inline __mmask32 first_of_32(count some) {
    return some >= 32 ? 0xffffffff : some <= 0 ? 0 : (__mmask32)((1u << some) - 1);
}

/* 16 numbers from one on, of which so many are there. */
static inline __m512i words(const number *from, count some) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of_16(some), from));
}

static inline __m512 widened(const number *from, count some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(words(from, some), 16));
}

static inline void store_rounded(number *to, count some, __m512 values) {
    _mm256_mask_storeu_epi16(to, first_of_16(some), (__m256i)_mm512_cvtneps_pbh(values));
}

/* Two by two squares of C, the second row of them `down` numbers after the first: products of so
   many tiles, `added` to what is there or in its place. Of A there are two rows of tiles, `a_down`
   apart, and of B two columns, `b_right` apart; the next tiles of either lie a step on. */
static inline void multiply_tiles(float *c, count down, int added, const number *a, count a_down,
                                  count a_step, const number *b, count b_right, count b_step,
                                  count steps);
/* What a thread does before its first product and after its last; 64 bytes keep what was there. */
static inline void begin_tiles(void *before);
static inline void end_tiles(const void *before);

#ifdef __AMX_BF16__
#include "tiles_amx.h"
#else
#include "tiles_avx512.h"
#endif

/* Rows become columns, of 16 by 16 words of 32 bits. */
static inline void turn(__m512i *rows) {
    __m512i half[16];
    EACH(i, 0, 8) {
        half[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        half[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    EACH(i, 0, 4) {
        rows[4 * i] = _mm512_unpacklo_epi64(half[4 * i], half[4 * i + 2]);
        rows[4 * i + 1] = _mm512_unpackhi_epi64(half[4 * i], half[4 * i + 2]);
        rows[4 * i + 2] = _mm512_unpacklo_epi64(half[4 * i + 1], half[4 * i + 3]);
        rows[4 * i + 3] = _mm512_unpackhi_epi64(half[4 * i + 1], half[4 * i + 3]);
    }
    EACH(i, 0, 4) {
        half[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        half[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        half[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        half[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    }
    EACH(i, 0, 4) {
        rows[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
        rows[i + 4] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0x88);
        rows[i + 12] = _mm512_shuffle_i32x4(half[i + 4], half[i + 12], 0xdd);
    }
}

/* 32 numbers of a token from `at` on, 0 after the last. */
static inline __m512i numbers(given x, count length, count token, count at) {
    if (token >= length) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(first_of_32(x.width - at), x.first + token * x.step + at);
}

/* 16 pairs of the numbers of two tokens. */
static inline __m512i paired(given x, count length, count token, count at) {
    __m512i pair[2];
    EACH(i, 0, 2) {
        pair[i] = _mm512_setzero_si512();
        if (token + i < length)
            pair[i] = words(x.first + (token + i) * x.step + at, x.width - at);
    }
    return _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16));
}

/* X as B, or where asked for X^T as A: a block of tokens after another, tile after tile of 16
   numbers. */
static inline void lay_pairs(given x, count length, count blocks, count size, int turned,
                             number *to) {
    __m512i rows[16];
    EACH(block, 0, blocks) for (count at = 0; at < size; at += 16, to += TILE) {
        EACH(i, 0, 16) rows[i] = paired(x, length, BLOCK * block + 2 * i, at);
        if (turned) turn(rows);
        EACH(i, 0, 16) _mm512_storeu_si512(to + 32 * i, rows[i]);
    }
}

#else

int tiles_of_this_process(void) { return NOWHERE; }

#endif
