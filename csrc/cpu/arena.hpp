// Memory for weights.
#pragma once
#include <cstddef>
#include <memory>

namespace octavo {

// Zeroed memory, aligned to cache lines, in large pages where the system gives them: weights are read from end to end
// in every step, and with small pages each 4 KiB would cost a walk of the page tables. Small pieces share a large page;
// it goes back to the system with the last of them. Throws std::bad_alloc.
std::shared_ptr<void> allocate_weights(size_t bytes);

}  // namespace octavo
