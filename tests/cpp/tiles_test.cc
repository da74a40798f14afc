// What the Hopper GEMM decides on the host: its tile, how kernels divide, what devices are asked.
#include "cuda/tiles.h"

#include <gtest/gtest.h>

#include <limits>

#include "divisor.h"
#include "per_device.h"
#include "testing.h"

namespace blockscale::cuda {
namespace {

GemmSize dense(int64_t m, int64_t n, int64_t k, bool square = true) {
  GemmSize s;
  s.rows = m;
  s.columns = n;
  s.blocks = (k + 127) / 128;
  s.square = square;
  return s;
}
const TileShape& chosen(const GemmSize& s) { return kTiles[choose_tile(s)]; }

// What the kernel asks of a tile, whichever is added to the table.
TEST(Tiles, FitTheMachine) {
  for (const TileShape& t : kTiles) {
    // Stages of both operands and their scales, and what is staged of the output, in 227 KB, with
    // room for barriers and 1024 groups.
    const int stage = (t.rows() + t.columns()) * 128 + (t.rows() + t.columns()) * 4 + 256;
    for (const bool square : {false, true}) {
      const TileShape made = t.with_scales(square);
      EXPECT_EQ(made.rows(), t.rows());
      EXPECT_EQ(made.columns(), t.columns());
      EXPECT_EQ(made.unit_rows(), t.unit_rows());
      EXPECT_EQ(made.unit_columns(), t.unit_columns());
      EXPECT_EQ(made.chunks() > 0, !t.split && t.n >= 64) << t.rows() << " x " << t.columns();
      EXPECT_LE(made.stages * stage + t.groups * made.chunks() * 8192 + 10240, 227 * 1024)
          << t.rows() << " x " << t.columns();
    }
    // Sums and the tensor cores' accumulators, of 224 registers (152 with three warpgroups).
    EXPECT_LE(t.waves * t.n / 2 + t.n / 2, t.groups == 2 ? 200 : 136);
    EXPECT_LE(t.rows(), 256);  // of a box of the copy engine
    EXPECT_LE(t.columns(), 256);
    EXPECT_TRUE(!t.split || t.rows() == 64);
    EXPECT_EQ(128 % t.n, 0);  // a warpgroup's columns lie in one block of B
  }
}

TEST(Tiles, LargeProductsGetLargeTiles) {
  for (const bool square : {true, false}) {
    const TileShape& t = chosen(dense(4096, 4096, 4096, square));
    EXPECT_EQ(t.rows() * t.columns(), 256 * 128);
  }
  EXPECT_EQ(chosen(dense(4096, 7168, 2048)).rows(), 256);
  // Where the last round of tiles weighs little, three warpgroups.
  EXPECT_EQ(chosen(dense(8192, 8192, 8192)).rows(), 192);
  EXPECT_EQ(chosen(dense(8192, 14336, 4096)).rows(), 192);
}

// FP32 sums of a short K take longer to write than to compute.
TEST(Tiles, OutputCounts) {
  for (const int64_t groups : {8, 16}) {
    GemmSize s = dense(2048, 2048, 4096 / groups, false);
    s.groups = groups;
    s.grouped = true;
    EXPECT_EQ(chosen(s).rows(), 256);
    s.f32 = true;
    EXPECT_EQ(chosen(s).rows(), 192);
  }
  GemmSize s = dense(4096, 4096, 4096, false);
  s.f32 = true;
  EXPECT_EQ(chosen(s).rows(), 256);
}

// 288 tiles of 256 x 128 would be 2.2 rounds of the machine.
TEST(Tiles, WavesCount) {
  const TileShape& t = chosen(dense(4096, 2304, 7168));
  EXPECT_LT(t.rows() * t.columns(), 256 * 128);
  EXPECT_LT(tile_cost(t, dense(4096, 2304, 7168)), tile_cost(kTiles[0], dense(4096, 2304, 7168)));
}

TEST(Tiles, FewRowsGetFlatTiles) {
  for (const int m : {1, 16, 64}) {
    EXPECT_EQ(chosen(dense(m, 7168, 2048)).rows(), 64) << m;
    // Few columns: several CTAs on a tile, so that more multiprocessors read B.
    EXPECT_TRUE(chosen(dense(m, 2048, 7168)).split) << m;
  }
}

// CTAs that split K stay for one tile, and know no groups.
TEST(Tiles, OnlySmallDenseProductsAreSplit) {
  for (const int64_t m : {1, 64, 128, 512, 4096})
    for (const int64_t n : {128, 2048, 7168, 24576})
      for (const int64_t k : {128, 2048, 7168}) {
        GemmSize s = dense(m, n, k);
        const TileShape& t = chosen(s);
        if (t.split) {
          EXPECT_LE((m + 63) / 64 * ((n + t.columns() - 1) / t.columns()) * t.cluster, 132);
        }
        s.grouped = true;
        EXPECT_FALSE(chosen(s).split) << m << " " << n << " " << k;
      }
}

TEST(Tiles, ClustersFitTheMultiprocessors) {
  for (const int multiprocessors : {1, 2, 3}) {
    for (const int64_t rows : {64, 4096}) {
      GemmSize s = dense(rows, 128, 65536);
      s.multiprocessors = multiprocessors;
      EXPECT_LE(chosen(s).cluster, multiprocessors);
    }
  }
}

TEST(Tiles, GroupsCountAsTheirOwnProducts) {
  GemmSize s = dense(32, 4096, 4096);  // 256 experts of 32 tokens
  s.groups = 256;
  EXPECT_EQ(chosen(s).rows(), 64);
  s.rows = 8192;
  s.groups = 4;
  EXPECT_GE(chosen(s).rows(), 192);
  // As many CTAs as multiprocessors, which do not wait for each other.
  s = dense(256, 1024, 1024);
  s.groups = 8;
  EXPECT_EQ(chosen(s).cluster, 1);
}

TEST(Tiles, E5m2TakesWhatIsCompiledForIt) {
  for (const int64_t m : {1, 100, 500, 4096})
    for (const int64_t n : {70, 2304, 4096}) {
      GemmSize s = dense(m, n, 7168);
      s.a_e5m2 = true;
      EXPECT_TRUE(chosen(s).e5m2) << m << " " << n;
      // As MXFP4 they are both: then every tile is there.
      const int plain = choose_tile(dense(m, n, 7168));
      s.b_e5m2 = true;
      EXPECT_EQ(choose_tile(s), plain) << m << " " << n;
    }
}

TEST(Tiles, CostGrowsWithTheProduct) {
  for (const TileShape& t : kTiles) {
    double last = 0;
    for (const int64_t m : {1, 128, 1000, 4096, 10000}) {
      const double cost = tile_cost(t, dense(m, 4096, 4096));
      EXPECT_GE(cost, last);
      last = cost;
    }
    EXPECT_LT(tile_cost(t, dense(64, 1024, 2048)), tile_cost(t, dense(64, 1024, 4096)));
  }
}

TEST(Tiles, ConcurrentTilesFormASquare) {
  for (const TileShape& t : kTiles) {
    const GemmSize s = dense(1 << 16, 1 << 16, 4096);
    const double down = choose_band(t, s) * t.unit_rows();
    const double across =
        static_cast<double>(s.multiprocessors / t.cluster) / choose_band(t, s) * t.unit_columns();
    EXPECT_LT(down, 2 * across);
    EXPECT_LT(across, 2 * down);
  }
}

// What splits K never has more tiles than clusters.
TEST(Tiles, ClustersDrawWhereTheyHaveSeveralTiles) {
  for (const TileShape& t : kTiles) {
    const int clusters = 132 / t.cluster;
    GemmSize s = dense(t.unit_rows(), t.unit_columns() * (t.cluster == 4 ? 30 : clusters), 4096);
    EXPECT_FALSE(wants_dynamic(t, s));
    s.columns += 1;
    EXPECT_TRUE(wants_dynamic(t, s));
    if (t.split) {
      EXPECT_EQ(tile_cost(t, s), std::numeric_limits<double>::infinity());
    }
    s.columns = t.unit_columns(), s.groups = 150, s.grouped = true;
    EXPECT_TRUE(wants_dynamic(t, s));
  }
}

TEST(Divisor, DividesExactly) {
  constexpr int64_t kMost = 0x7FFFFFFF;
  testing::Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const int64_t by = i < 2000 ? i + 1 : 1 + (static_cast<int64_t>(random.below(kMost)) >> i % 31);
    const Divisor divisor(by);
    const auto n = static_cast<int64_t>(random.below(kMost + 1));
    for (const int64_t m : {int64_t{0}, n, n / by * by, n / by * by - 1, kMost / by * by, kMost})
      if (m >= 0) {
        auto rest = static_cast<uint32_t>(m);
        ASSERT_EQ(divisor.divide(rest), m / by) << m << " / " << by;
        ASSERT_EQ(rest, m % by) << m << " / " << by;
      }
  }
}

// Devices are asked until they answer, each for itself; those beyond the table each time.
TEST(PerDevice, IsAskedOnce) {
  PerDevice numbers;
  int asked = 0;
  const auto get = [&](int device, int answer) {
    return numbers.get(device, [&] { return ++asked, answer; });
  };
  for (const int device : {0, 1, 63}) {
    asked = 0;
    EXPECT_EQ(get(device, 0), 0);  // such as after a failure
    EXPECT_EQ(get(device, 5 + device), 5 + device);
    EXPECT_EQ(get(device, 7), 5 + device);
    EXPECT_EQ(asked, 2) << device;
  }
  for (const int device : {-1, 64, 1000}) {
    EXPECT_EQ(get(device, 8), 8) << device;
    EXPECT_EQ(get(device, 9), 9) << device;
  }
}

// Without scales: the larger tile but where it leaves multiprocessors idle.
TEST(Tiles, OfBf16) {
  const auto size = [](int64_t m, int64_t n, int64_t k) {
    GemmSize s;
    s.rows = m, s.columns = n, s.blocks = (k + 63) / 64, s.scaled = false;
    return s;
  };
  const auto shape = [&](int64_t m, int64_t n, int64_t k) {
    const TileShape& t = kBf16Tiles[choose_tile(size(m, n, k))];
    return std::pair(t.rows(), t.columns());
  };
  EXPECT_EQ(shape(8192, 8192, 8192), std::pair(256, 128));
  EXPECT_EQ(shape(10007, 2880, 2880), std::pair(256, 128));
  EXPECT_EQ(shape(2304, 4096, 4096), std::pair(128, 128));  // 288 and 576 tiles
  EXPECT_EQ(shape(512, 4096, 4096), std::pair(128, 128));
  EXPECT_EQ(shape(256, 4096, 4096), std::pair(64, 128));
  EXPECT_EQ(shape(1024, 1024, 1024), std::pair(64, 128));
  EXPECT_EQ(shape(128, 4096, 4096), std::pair(64, 64));
  EXPECT_EQ(shape(1, 4096, 4096), std::pair(64, 32));
  const auto pays_of = [&](int64_t m, int64_t n, int64_t k) { return pays(size(m, n, k)); };
  EXPECT_TRUE(pays_of(8192, 8192, 8192));
  EXPECT_TRUE(pays_of(128, 4096, 4096));
  EXPECT_TRUE(pays_of(128, 4096, 14336));
  EXPECT_TRUE(pays_of(128, 2048, 7168));
  EXPECT_TRUE(pays_of(16, 16, 1024));
  EXPECT_TRUE(pays_of(768, 768, 2048));
  EXPECT_TRUE(pays_of(2048, 2048, 8192));
  EXPECT_FALSE(pays_of(768, 768, 32768));  // a narrow layer's weight gradient: K is to be divided
  EXPECT_FALSE(pays_of(768, 3072, 8192));  // a round of tiles and a bit
  EXPECT_FALSE(pays_of(1536, 1536, 8192));
  EXPECT_FALSE(pays_of(256, 256, 65536));
  EXPECT_FALSE(pays_of(128, 512, 8192));
  EXPECT_TRUE(is_brief(size(1, 1, 1)));
  EXPECT_TRUE(is_brief(size(1024, 1024, 512)));
  EXPECT_TRUE(is_brief(size(128, 1024, 1024)));
  EXPECT_FALSE(is_brief(size(1024, 1024, 1024)));
  EXPECT_FALSE(is_brief(size(128, 4096, 4096)));
}

// Where each row of B meets few rows of A, it is decoded in the kernel; the measured times are in
// docs/performance/gemm.md.
TEST(Tiles, ThatDecode) {
  const auto size = [](int64_t m, int64_t n, int64_t k, int64_t groups, double code_bytes) {
    GemmSize s;
    s.grouped = groups > 0, s.groups = std::max<int64_t>(groups, 1);
    s.rows = m / s.groups, s.columns = n, s.blocks = k / 64;
    s.scaled = false, s.code_bytes = code_bytes;
    return s;
  };
  const auto shape = [&](int64_t m, int64_t n, int64_t k, int64_t groups) {
    const TileShape& t = kCodedTiles[choose_tile(size(m, n, k, groups, 0.5))];
    return std::pair(t.rows(), t.columns());
  };
  EXPECT_EQ(shape(4096, 4096, 4096, 8), std::pair(256, 128));
  EXPECT_EQ(shape(1024, 4096, 4096, 0), std::pair(256, 128));
  EXPECT_EQ(shape(512, 4096, 4096, 0), std::pair(128, 128));
  EXPECT_EQ(shape(8192, 768, 2048, 128), std::pair(128, 128));
  EXPECT_EQ(shape(128, 4096, 4096, 0), std::pair(64, 64));
  EXPECT_EQ(shape(16, 4096, 4096, 0), std::pair(64, 32));
  const auto pays_of = [&](int64_t m, int64_t n, int64_t k, int64_t groups, double code_bytes,
                           bool needs_pass = true) {
    return pays_to_decode(size(m, n, k, groups, code_bytes), needs_pass);
  };
  for (const double bytes : {0.5, 1.0})
    for (const bool needs_pass : {false, true}) {
      const auto what = std::pair(bytes, needs_pass);
      EXPECT_TRUE(pays_of(16, 4096, 4096, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_TRUE(pays_of(128, 14336, 4096, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_TRUE(pays_of(4096, 4096, 4096, 8, bytes, needs_pass)) << what.first << what.second;
      EXPECT_TRUE(pays_of(8192, 768, 2048, 128, bytes, needs_pass)) << what.first << what.second;
      EXPECT_FALSE(pays_of(256, 4096, 4096, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_FALSE(pays_of(512, 4096, 4096, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_FALSE(pays_of(2048, 4096, 4096, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_FALSE(pays_of(8192, 8192, 8192, 0, bytes, needs_pass)) << what.first << what.second;
      EXPECT_FALSE(pays_of(16384, 4096, 4096, 8, bytes, needs_pass)) << what.first << what.second;
      // Another library divides K.
      EXPECT_FALSE(pays_of(128, 512, 8192, 0, bytes, needs_pass)) << what.first << what.second;
    }
  EXPECT_TRUE(pays_of(1024, 4096, 4096, 0, 0.5));
  EXPECT_TRUE(pays_of(8192, 4096, 4096, 8, 0.5));
  // Without a pass the other library's product is faster by more than decoding takes.
  EXPECT_FALSE(pays_of(640, 8192, 4096, 0, 1, false));
}

}  // namespace
}  // namespace blockscale::cuda
