// Whether the matrix unit is used: Linux lends the tiles' registers to a process that asks for them.
#include <sys/syscall.h>
#include <unistd.h>

bool afina_tiles = false;

// Uses it from here on, or does not; says which.
extern "C" int afina_use_tiles(int wanted) {
#if defined(__AMX_BF16__)
  const int request = 0x1023, tiles = 18;
  afina_tiles = wanted && syscall(SYS_arch_prctl, request, tiles) == 0;
#else
  (void)wanted;
#endif
  return afina_tiles;
}
