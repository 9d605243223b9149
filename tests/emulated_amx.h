/* AMX in plain C, for tests on CPUs without it: its instructions are replaced where this is included
   first, and the system grants them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define syscall(...) 0

static _Thread_local uint8_t tiles[8][16][64];

static inline float bf16(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    uint32_t whole = (uint32_t)half << 16;
    float value;
    memcpy(&value, &whole, 4);
    return value;
}

static inline void load_tile(int tile, const void *from, long step) {
    for (int row = 0; row < 16; row++) memcpy(tiles[tile][row], (const char *)from + row * step, 64);
}

static inline void store_tile(int tile, void *to, long step) {
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * step, tiles[tile][row], 64);
}

static inline void multiply_bf16(int c, int a, int b) {
    for (int row = 0; row < 16; row++)
        for (int pair = 0; pair < 16; pair++)
            for (int column = 0; column < 16; column++) {
                float sum;
                memcpy(&sum, tiles[c][row] + 4 * column, 4);
                for (int one = 0; one < 4; one += 2)
                    sum += bf16(tiles[a][row] + 4 * pair + one) *
                           bf16(tiles[b][pair] + 4 * column + one);
                memcpy(tiles[c][row] + 4 * column, &sum, 4);
            }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_storeconfig
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_zero(tile) memset(tiles[tile], 0, sizeof tiles[tile])
#define _tile_dpbf16ps multiply_bf16
#define _tile_loadconfig(from) (void)(from)
#define _tile_storeconfig(to) (void)(to)
