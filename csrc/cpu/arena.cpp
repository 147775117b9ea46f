#include "arena.hpp"

#include <cstdint>
#include <mutex>
#include <new>

#include <sys/mman.h>

namespace octavo {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{16} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// A run of large pages, handed out from the beginning.
class Chunk {
 public:
  explicit Chunk(size_t bytes) : mapped_(bytes + kLargePage), bytes_(bytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    begin_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base_), kLargePage));
#ifdef MADV_HUGEPAGE
    madvise(begin_, bytes_, MADV_HUGEPAGE);
#endif
  }
  ~Chunk() { munmap(base_, mapped_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  void* take(size_t bytes) {
    if (bytes > bytes_ - used_) return nullptr;
    void* piece = begin_ + used_;
    used_ += round_up(bytes, kLine);
    return piece;
  }

 private:
  size_t mapped_, bytes_, used_ = 0;
  void* base_;
  char* begin_;
};

}  // namespace

std::shared_ptr<void> allocate_weights(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Chunk> latest;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = latest.lock();
  void* piece = chunk ? chunk->take(bytes) : nullptr;
  if (piece == nullptr) {
    chunk = std::make_shared<Chunk>(bytes > kChunk ? round_up(bytes, kLargePage) : kChunk);
    piece = chunk->take(bytes);
    latest = chunk;
  }
  return std::shared_ptr<void>(chunk, piece);
}

}  // namespace octavo
