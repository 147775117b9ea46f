#include "attention_plan.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "threads.hpp"

namespace octavo {

namespace {

// Rows of a tile: enough to amortise the reads of keys and values, few enough that the tile's data stays in L1 and L2.
constexpr int64_t kRowsOfItem = 30;
// Of a latent cache, whose panels are gathered for each tile.
constexpr int64_t kRowsOfLatentItem = 64;

// Products of a query and a key that are worth waking a thread for; of one head, about a nanosecond each.
constexpr int64_t kWorthAThread = 4096;

// Tiles, of all KV heads, per thread, for load balance.
constexpr int64_t kTilesOfThread = 4;

// Reusable memory that grows; growth discards its content.
class Scratch {
 public:
  float* of(int64_t floats) {
    if (floats > size_) {
      memory_.reset(new float[static_cast<size_t>(floats) + 16]);
      size_ = floats;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};

struct Work {
  AttentionItem item;
  int64_t cost;
};

// Calls f(i) for each item, `at_once` neighbours in one thread; most often the next ones are that thread's too.
template <typename F>
void for_items(int64_t count, int64_t threads, int64_t at_once, const F& f) {
  if (threads == 1) at_once = std::max<int64_t>(1, count);
  parallel_for((count + at_once - 1) / at_once, [&](int64_t group) {
    for (int64_t i = group * at_once; i < std::min(count, (group + 1) * at_once); ++i) f(i);
  });
}

// Every tile of rows [begin_row, end_row) with its whole context; the KV heads of the same rows are neighbours, here and wherever items are
// put in another order.
std::vector<Work> tiles_of(const Attention& a, const Step& step, int64_t begin_row, int64_t end_row) {
  std::vector<Work> tiles;
  const int64_t tile_rows = a.shape.latent ? kRowsOfLatentItem : kRowsOfItem;
  const int64_t tile_queries = std::max<int64_t>(1, tile_rows / a.group());
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t start = step.query_start[s];
    const int64_t queries = std::min<int64_t>(step.query_start[s + 1], end_row) - start;
    for (int64_t first = std::max<int64_t>(0, begin_row - start); first < queries; first += tile_queries) {
      const int64_t count = std::min(tile_queries, queries - first);
      const int64_t position = step.positions[step.query_start[s] + first];
      int64_t last = position + count - 1 + a.after();
      if (a.sees_spans && step.sees_until)
        last = std::max<int64_t>(last, step.sees_until[step.query_start[s] + first + count - 1]);
      const int64_t seen = std::min<int64_t>(last + 1, step.seq_lens[s]);
      const int64_t begin = a.first_seen(position) / kPiece;
      const int64_t end = (seen + kPiece - 1) / kPiece;
      // A row too many stands for reading the keys and values.
      const int64_t cost = (seen - begin * kPiece) * (count * a.group() + 1);
      for (int64_t head = 0; head < a.shape.kv_heads; ++head)
        tiles.push_back({{s, head, first, count, begin, end, nullptr}, cost});
    }
  }
  return tiles;
}

int64_t piece_floats(const Attention& a, const AttentionItem& item) {
  return item.queries * a.group() * state_floats(a);
}

// One piece of a tile that is cut.
Work piece_of(const Attention& a, AttentionItem item, int64_t piece) {
  item.states += (piece - item.first_piece) * piece_floats(a, item);
  item.first_piece = piece;
  item.end_piece = piece + 1;
  return {item, kPiece * (item.queries * a.group() + 1)};
}

}  // namespace

float* attention_scratch(int64_t floats) {
  thread_local Scratch scratch;
  return scratch.of(floats);
}

void run_attention(const Attention& a, const Step& step, int64_t begin, int64_t end) {
  const std::vector<Work> tiles = tiles_of(a, step, begin, end);
  int64_t total = 0;
  for (const Work& tile : tiles) total += tile.cost;
  const int64_t threads = std::min<int64_t>(ThreadPool::instance().size(), 1 + total / kWorthAThread);

  // A tile of more work than this would delay the other threads: it is cut into its pieces.
  const int64_t too_dear = threads > 1 ? total / (4 * threads) : total;
  std::vector<Work> items;
  std::vector<AttentionItem> cut;
  int64_t state_memory = 0;
  for (const Work& tile : tiles) {
    const int64_t pieces = tile.item.end_piece - tile.item.first_piece;
    if (tile.cost <= too_dear || pieces == 1) {
      items.push_back(tile);
      continue;
    }
    cut.push_back(tile.item);
    state_memory += pieces * piece_floats(a, tile.item);
  }
  thread_local Scratch states;
  float* next_state = states.of(state_memory);
  for (AttentionItem& item : cut) {
    item.states = next_state;
    next_state += (item.end_piece - item.first_piece) * piece_floats(a, item);
  }
  const int64_t heads = a.shape.kv_heads;
  for (size_t first = 0; first < cut.size(); first += heads)
    for (int64_t piece = cut[first].first_piece; piece < cut[first].end_piece; ++piece)
      for (int64_t head = 0; head < heads; ++head) items.push_back(piece_of(a, cut[first + head], piece));
  if (threads > 1)
    std::stable_sort(items.begin(), items.end(), [](const Work& x, const Work& y) { return x.cost > y.cost; });

  const AttentionTable& kernels = *isa().attention;
  const auto count = static_cast<int64_t>(items.size());
  // The heads of a block are consecutive, and hardware prefetches of one head reach into the next: they are lost if
  // another thread reads that head. So a thread computes all heads of a tile, if there are enough tiles.
  const int64_t at_once = count >= kTilesOfThread * threads * heads ? heads : 1;
  for_items(count, threads, at_once, [&](int64_t i) {
    kernels.attend(a, step, items[i].item, i + 1 < count ? &items[i + 1].item : nullptr);
  });
  for_items(static_cast<int64_t>(cut.size()), threads, 1, [&](int64_t i) { kernels.combine(a, step, cut[i]); });
}

}  // namespace octavo
