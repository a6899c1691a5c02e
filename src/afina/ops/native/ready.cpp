// Whether the kernels may run: Linux lends the tiles' registers to a process that asks for them.
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int afina_ready() {
  const int request = 0x1023, tiles = 18;
  return syscall(SYS_arch_prctl, request, tiles) == 0;
}
