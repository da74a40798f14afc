// Which units a cluster computes, and how its warps learn of them.
//
// Fixed: cluster c of n has units c, c + n, c + 2n... Dynamic: clusters draw units from a counter
// in global memory. Clusters that run faster, or that began while others had no multiprocessor yet,
// take more, and units that run at the same time are close together.
//
// The thread that loads codes is ahead of all others and schedules for them: it posts the work of
// its CTA's units one after another in shared memory. In a dynamic schedule, the thread in a
// cluster's first CTA draws a number and sends it to the thread in the other CTA.
#pragma once

#include "cuda/sm90/counters.h"
#include "cuda/sm90/problem.h"
#include "cuda/sm90/ptx.h"

namespace blockscale::sm90 {

// Numbers drawn so far, and clusters that have drawn their last: the last cluster of a launch to do
// so resets both to 0, so that they are 0 when no launch uses them.
struct Counter {
  int drawn, done;
};
// Each source with kernels has its own array, so that kernels of both kinds may share a number.
static __device__ Counter counters[kCounters];

// Where a CTA's units are posted: slots in shared memory, used in turn.
struct Mailbox {
  static constexpr int kSlots = 4;
  // A slot has a full and an empty barrier for the posted work and, for clusters, two more for the
  // number that one CTA sends the other, and the number itself.
  static constexpr int kSlotBytes = 40, kWorkAt = kSlots * kSlotBytes;
  static constexpr int kBytes = kWorkAt + kSlots * static_cast<int>(sizeof(Work));
  uint32_t base;
  Work* posted;

  BLOCKSCALE_DEVICE static uint32_t phase(int turn) { return turn / kSlots % 2; }
  BLOCKSCALE_DEVICE uint32_t full(int turn) const { return base + turn % kSlots * kSlotBytes; }
  BLOCKSCALE_DEVICE uint32_t empty(int turn) const { return full(turn) + 8; }
  BLOCKSCALE_DEVICE uint32_t number_full(int turn) const { return full(turn) + 16; }
  BLOCKSCALE_DEVICE uint32_t number_empty(int turn) const { return full(turn) + 24; }
  BLOCKSCALE_DEVICE uint32_t number(int turn) const { return full(turn) + 32; }

  // Called by one thread, before any barrier is used. `readers`: warps that read the posted work.
  BLOCKSCALE_DEVICE void init(int readers) const {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full(i), 1), barrier_init(empty(i), 32 * readers);
      barrier_init(number_full(i), 1), barrier_init(number_empty(i), 1);
    }
  }
  // The first work may be written before the barriers exist, and is posted once they do.
  BLOCKSCALE_DEVICE Work post_first() const {
    barrier_arrive(full(0));
    return posted[0];
  }
  BLOCKSCALE_DEVICE void post(int turn, const Work& w) const {
    barrier_wait(empty(turn), phase(turn) ^ 1);
    posted[turn % kSlots] = w;
    barrier_arrive(full(turn));
  }
  // Called by all lanes of a warp.
  BLOCKSCALE_DEVICE Work read(int turn) const {
    barrier_wait(full(turn), phase(turn));
    const Work w = posted[turn % kSlots];
    barrier_arrive(empty(turn));
    return w;
  }
};

// A schedule is dynamic if it has a counter. With K split, the launch has a cluster for every unit.
template <class T>
BLOCKSCALE_DEVICE bool is_dynamic(const Problem& p) {
  return !T::kSplit && p.counter >= 0;
}
// Whether a CTA's first unit depends on parameters alone: then the launch has no more clusters than
// units, and find_first() writes that work before the barriers exist.
template <class T>
BLOCKSCALE_DEVICE bool knows_first(const Problem& p) {
  return p.grouping == Grouping::dense && !is_dynamic<T>(p);
}
template <class T>
BLOCKSCALE_DEVICE void find_first(const Problem& p, const Mailbox& mailbox, int rank) {
  int place = 0;
  if (knows_first<T>(p))
    mailbox.posted[0] =
        work_of<T>(p, nullptr, static_cast<int>(blockIdx.x) / T::kCluster, rank, place);
}

// Follows its CTA's units, one after another until there are none.
struct Reader {
  const Mailbox& mailbox;
  BLOCKSCALE_DEVICE Work next(int turn) const { return mailbox.read(turn); }
  BLOCKSCALE_DEVICE void ask() const {}
};

// The same for the thread that loads codes, which finds the units.
template <class T>
class Scheduler {
 public:
  BLOCKSCALE_DEVICE Scheduler(const Problem& problem, const WorkBefore* starts,
                              const Mailbox& mailbox, int rank)
      : problem_(problem),
        starts_(starts),
        mailbox_(mailbox),
        rank_(rank),
        count_(unit_count(problem, starts)) {
    if (dynamic()) before_units(problem);
    ask();
  }
  BLOCKSCALE_DEVICE Work next(int turn) {
    // In this order: in the other, ptxas spills registers of the loop that loads codes.
    if (knows_first<T>(problem_) && turn == 0) return mailbox_.post_first();
    const int unit = dynamic() ? next_drawn(turn) : cluster() + turn * clusters();
    const Work w = unit < count_ ? work_of<T>(problem_, starts_, unit, rank_, place_) : no_work();
    mailbox_.post(turn, w);
    return w;
  }
  // Whether this is the cluster's first CTA.
  BLOCKSCALE_DEVICE bool first() const { return T::kCluster == 1 || rank_ == 0; }
  // Requests the next number, some time before it is needed.
  BLOCKSCALE_DEVICE void ask() {
    if (!dynamic() || !first()) return;
    number_ = add_relaxed(counters[problem_.counter].drawn, 1);
  }

 private:
  static BLOCKSCALE_DEVICE int clusters() { return static_cast<int>(gridDim.x) / T::kCluster; }
  static BLOCKSCALE_DEVICE int cluster() { return static_cast<int>(blockIdx.x) / T::kCluster; }
  BLOCKSCALE_DEVICE bool dynamic() const { return is_dynamic<T>(problem_); }

  BLOCKSCALE_DEVICE int next_drawn(int turn) {
    if constexpr (T::kCluster > 1) first() ? tell(turn) : hear(turn);
    if (first() && number_ >= count_) end(turn);
    return number_;
  }
  // The number of clusters does not depend on device memory, such as offsets.
  BLOCKSCALE_DEVICE void end(int turn) const {
    Counter& counter = counters[problem_.counter];
    if (add_ordered(counter.done, 1) == clusters() - 1) counter = {0, 0};
    if constexpr (T::kCluster > 1)  // stay until the other CTA has received every number
      for (int i = max(0, turn - Mailbox::kSlots + 1); i <= turn; ++i)
        barrier_wait(mailbox_.number_empty(i), Mailbox::phase(i));
  }
  BLOCKSCALE_DEVICE void tell(int turn) const {
    barrier_wait(mailbox_.number_empty(turn), Mailbox::phase(turn) ^ 1);
    send(there_of(mailbox_.number(turn), 1), number_, there_of(mailbox_.number_full(turn), 1));
  }
  BLOCKSCALE_DEVICE void hear(int turn) {
    barrier_expect(mailbox_.number_full(turn), sizeof number_);
    barrier_wait(mailbox_.number_full(turn), Mailbox::phase(turn));
    number_ = load_shared_int(mailbox_.number(turn));
    barrier_arrive_there(there_of(mailbox_.number_empty(turn), 0));
  }

  const Problem& problem_;
  const WorkBefore* const starts_;
  const Mailbox& mailbox_;
  const int rank_, count_;  // numbers from the unit count on are no units
  int place_ = 0, number_ = 0;
};

}  // namespace blockscale::sm90
