// What calibrate.py asks and tells before the first product: may this process use AMX, and how to multiply.
#include "choice.h"
#include "amx.h"

#ifdef REAL_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// What any processor does, until something is chosen.
Way way_float32 = {0, NTA}, way_bfloat16 = {0, NTA};

// Linux keeps 8 KiB of tiles for a thread only in processes that asked for it, once; an old kernel or a
// sandbox may refuse. It asks the processor too, but not which products it has.
static bool ask_for_tiles() {
#if defined EMULATED_TILES_SERVE
    return true;
#elif defined REAL_TILES
    constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24;  // of EDX
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    unsigned eax, ebx, ecx, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & AMX_BF16 && edx & AMX_TILE &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

extern "C" int32_t tiles_allowed() {
    static const bool allowed = ask_for_tiles();
    return allowed;
}

// Not while a product runs. Tiles that are not allowed would end the process: they stay vectors.
extern "C" void choose_float32(int32_t, int32_t prefetch) { way_float32 = {0, prefetch}; }
extern "C" void choose_bfloat16(int32_t tiles, int32_t prefetch) {
    way_bfloat16 = {tiles && tiles_allowed(), prefetch};
}
