// Hopper's own instructions as functions: shared-memory barriers, the copy engine, clusters.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/barrier.h"
#include "gpu/port.h"

namespace blockscale::sm90 {

using cuda::barrier_arrive;
using cuda::barrier_expect;
using cuda::barrier_init;
using cuda::barrier_init_done;
using cuda::barrier_wait;
using cuda::copy_box;
using gpu::after_previous;
using gpu::shared_address;
using gpu::to_bf16x2;

// A load that stays after after_previous(). Data that __ldg() reads counts as written before the
// kernel began, so the compiler moves __ldg() ahead of a wait that is not the kernel's first
// statement.
BLOCKSCALE_DEVICE float load_after(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
// These add `value` in device memory and return what was there before: in any order with this
// thread's other reads and writes, or after all of them.
BLOCKSCALE_DEVICE int add_relaxed(int& at, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(&at), "r"(value)
               : "memory");
  return before;
}
BLOCKSCALE_DEVICE int add_ordered(int& at, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(&at), "r"(value)
               : "memory");
  return before;
}
// Prefetches a tensor map to where the copy engine reads it from.
BLOCKSCALE_DEVICE void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
BLOCKSCALE_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

// ---- barriers: what cuda/barrier.h lacks --------------------------------------------------------
// The address in CTA `rank` of the cluster that corresponds to this address here.
BLOCKSCALE_DEVICE uint32_t there_of(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// The barriers order the copy engine's writes and the tensor cores' reads, and a few ordinary loads
// (of scales, and of the number drawn) whose values are in registers before the arrival. So neither
// this nor the wait asks for a wider scope than the default: that would flush caches.
BLOCKSCALE_DEVICE void barrier_arrive_there(uint32_t barrier_there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], 1;" ::"r"(barrier_there) : "memory");
}
// Whether the phase has completed, without waiting for it.
BLOCKSCALE_DEVICE bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// A barrier of `threads` threads of the block; `id` is not 0, which is the barrier of
// __syncthreads().
BLOCKSCALE_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- the copy engine ---------------------------------------------------------------------------
// Like copy_box, for `bytes` contiguous bytes: the count and both addresses are multiples of 16.
template <bool kBoth>
BLOCKSCALE_DEVICE void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if constexpr (kBoth)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
BLOCKSCALE_DEVICE void store_box(uint32_t from, const CUtensorMap& map, int x, int y, int z,
                                 bool add) {
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(x), "r"(y), "r"(z)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
        "[%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(from), "r"(x), "r"(y), "r"(z)
        : "memory");
}
BLOCKSCALE_DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores have read their source.
BLOCKSCALE_DEVICE void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// ---- copies by threads themselves --------------------------------------------------------------
BLOCKSCALE_DEVICE void copy_16_bytes(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Arrives when all copies that this thread has issued so far are complete.
BLOCKSCALE_DEVICE void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- shared memory -----------------------------------------------------------------------------
BLOCKSCALE_DEVICE float load_shared(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
BLOCKSCALE_DEVICE int load_shared_int(uint32_t address) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
// Sends four bytes to a CTA of the cluster, and counts them toward what its barrier expects. Both
// addresses are from there_of(), for the same CTA.
BLOCKSCALE_DEVICE void send(uint32_t address_there, int value, uint32_t barrier_there) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
          address_there),
      "r"(value), "r"(barrier_there)
      : "memory");
}
BLOCKSCALE_DEVICE float2 load_shared2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
BLOCKSCALE_DEVICE void store_shared2(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// Loads from a CTA of the cluster; the address is from there_of().
BLOCKSCALE_DEVICE float4 load_there4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
BLOCKSCALE_DEVICE void store_shared4(uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
BLOCKSCALE_DEVICE void store_shared4(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
// Four 8 x 8 matrices of 16-bit words; lane l gives the address of row l % 8 of matrix l / 8.
BLOCKSCALE_DEVICE void store_matrices(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// ---- clusters, registers, lanes ----------------------------------------------------------------

// Kept in a register: threadIdx.x % 32 would be read and computed again at every use.
BLOCKSCALE_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
BLOCKSCALE_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
BLOCKSCALE_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The two halves of the same without its GPU-wide fence: what was written before stays
// unpublished, but for barriers after barrier_init_done().
BLOCKSCALE_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
BLOCKSCALE_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int kCount>
BLOCKSCALE_DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
BLOCKSCALE_DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace blockscale::sm90
