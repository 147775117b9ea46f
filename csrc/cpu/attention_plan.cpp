#include "attention_plan.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "threads.hpp"

namespace octavo {

namespace {

// Rows of a tile: enough that reading keys and values costs little beside using them, few enough that all that belongs
// to a tile stays in the first caches.
constexpr int64_t kRowsOfItem = 30;

// Products of a query and a key that are worth waking a thread for; of one head, about a nanosecond each.
constexpr int64_t kWorthAThread = 4096;

// Memory that grows and is used again; its content does not survive growth.
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

// Hands items out to threads as they become free.
template <typename F>
void for_items(int64_t count, int64_t threads, const F& f) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min(count, threads), [&](int64_t) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) f(i);
  });
}

// Every tile of rows with its whole context.
std::vector<Work> tiles_of(const Attention& a, const Step& step) {
  std::vector<Work> tiles;
  const int64_t tile_queries = std::max<int64_t>(1, kRowsOfItem / a.group());
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t queries = step.query_start[s + 1] - step.query_start[s], seq_len = step.seq_lens[s];
    for (int64_t first = 0; first < queries; first += tile_queries) {
      const int64_t count = std::min(tile_queries, queries - first), position = seq_len - queries + first;
      const int64_t begin = a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) / kPiece : 0;
      const int64_t end = (position + count + kPiece - 1) / kPiece;
      // A row too many stands for reading the keys and values.
      const int64_t cost = (position + count - begin * kPiece) * (count * a.group() + 1);
      for (int64_t head = 0; head < a.shape.kv_heads; ++head)
        tiles.push_back({{s, head, first, count, begin, end, nullptr}, cost});
    }
  }
  return tiles;
}

int64_t piece_floats(const Attention& a, const AttentionItem& item) {
  return item.queries * a.group() * state_floats(a);
}

}  // namespace

float* attention_scratch(int64_t floats) {
  thread_local Scratch scratch;
  return scratch.of(floats);
}

void run_attention(const Attention& a, const Step& step) {
  const std::vector<Work> tiles = tiles_of(a, step);
  int64_t total = 0;
  for (const Work& tile : tiles) total += tile.cost;
  const int64_t threads = std::min<int64_t>(ThreadPool::instance().size(), 1 + total / kWorthAThread);

  // A tile dearer than this would keep the others waiting: it is cut into its pieces.
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
    for (int64_t piece = item.first_piece; piece < item.end_piece; ++piece) {
      AttentionItem part = item;
      part.first_piece = piece;
      part.end_piece = piece + 1;
      part.states = next_state;
      next_state += piece_floats(a, item);
      items.push_back({part, kPiece * (item.queries * a.group() + 1)});
    }
  }
  if (threads > 1)
    std::stable_sort(items.begin(), items.end(), [](const Work& x, const Work& y) { return x.cost > y.cost; });

  const AttentionTable& kernels = *isa().attention;
  for_items(static_cast<int64_t>(items.size()), threads, [&](int64_t i) { kernels.attend(a, step, items[i].item); });
  for_items(static_cast<int64_t>(cut.size()), threads, [&](int64_t i) { kernels.combine(a, step, cut[i]); });
}

}  // namespace octavo
