/* Products of tiles by AMX: of its eight tiles the first four are squares of C. */

#define AMX

#include <sys/syscall.h>
#include <unistd.h>

/* What was stored is in memory: compilers do not know that instructions on tiles read it. */
#define SETTLED __asm__ volatile("" ::: "memory")

/* The system is asked for the room that tiles take. */
int tiles_of_this_process(void) {
    const long ask_for = 0x1023, data_of_tiles = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ask_for, data_of_tiles) == 0 ? IN_TILES : NOWHERE;
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

/* Two by two squares: the second row of them lies `down` numbers after the first. */
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

static inline void multiply_tiles(float *c, count down, int added, const number *a, count a_down,
                                  count a_step, const number *b, count b_right, count b_step,
                                  count steps) {
    if (added)
        load_sums(c, down);
    else
        no_sums();
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
    store_sums(c, down);
}
