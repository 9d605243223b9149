/* Tiles of CPUs with AMX: such are those of a product C += A B of bfloat16.

       A    16 rows of 32 numbers
       B    32 rows of 16 numbers, of which each two lie side by side: 16 rows of 16 pairs
       C    16 rows of 16 numbers of 32 bits

   TILES is defined where the compiler is for such a CPU. */

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

#define TILES

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int64_t count;
typedef uint16_t number;

/* Rows of a matrix, a token each: where the first begins, and numbers from row to row. */
typedef struct {
    const number *first;
    count step;
} given;

#define BLOCK 32        /* tokens */
#define TILE 512        /* numbers of 16 bits */
#define SQUARE 256      /* numbers of 32 bits */
/* What was stored is in memory: compilers do not know that instructions on tiles read it. */
#define SETTLED __asm__ volatile("" ::: "memory")
#define EACH(name, from, to) for (count name = (from); name < (to); name++)
#define EACH_PAIR(name, to) for (count name = 0; name < (to); name += 2)

static inline count less(count one, count other) { return one < other ? one : other; }
static inline count more(count one, count other) { return one > other ? one : other; }

static inline __m512 widened(const number *from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store_rounded(number *to, __m512 values) {
    _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

/* Tiles of 16 rows of 64 bytes, all eight. A thread's own configuration is another library's. */
static inline void begin_tiles(void *before) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } own = {.palette = 1};
    EACH(tile, 0, 8) own.bytes[tile] = 64, own.rows[tile] = 16;
    _tile_storeconfig(before);
    SETTLED;
    _tile_loadconfig(&own);
}

static inline void end_tiles(const void *before) { _tile_loadconfig(before); }

static inline void no_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Two by two tiles of C: the second row of them lies `down` numbers after the first. */
static inline void load_sums(const float *c, count down) {
    SETTLED;
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + SQUARE, 64);
    _tile_loadd(2, c + down, 64);
    _tile_loadd(3, c + down + SQUARE, 64);
}

static inline void store_sums(float *c, count down) {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + SQUARE, 64);
    _tile_stored(2, c + down, 64);
    _tile_stored(3, c + down + SQUARE, 64);
}

/* Adds products of so many tiles: of A two rows of tiles, `a_down` apart, and of B two columns,
   `b_right` apart; the next tiles of either lie a step on. */
static inline void add_products(const number *a, count a_down, count a_step, const number *b,
                                count b_right, count b_step, count steps) {
    SETTLED;
    EACH(step, 0, steps) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + b_right, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + a_down, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a += a_step;
        b += b_step;
    }
}

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
    return _mm512_loadu_si512(x.first + token * x.step + at);
}

/* 16 pairs of the numbers of two tokens. */
static inline __m512i paired(given x, count length, count token, count at) {
    __m512i pair[2];
    EACH(i, 0, 2) {
        __m256i half = _mm256_setzero_si256();
        if (token + i < length)
            half = _mm256_loadu_si256((const void *)(x.first + (token + i) * x.step + at));
        pair[i] = _mm512_cvtepu16_epi32(half);
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

/* Whether this process may use the tiles: the system is asked for the room that they take. */
int may_use_tiles(void) {
    const long ask_for = 0x1023, data_of_tiles = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ask_for, data_of_tiles) == 0;
}

#else

int may_use_tiles(void) { return 0; }

#endif
