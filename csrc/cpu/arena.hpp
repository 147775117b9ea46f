// Memory for weights.
#pragma once
#include <cstddef>
#include <memory>

namespace octavo {

// Zeroed memory, aligned to cache lines, in huge pages if the system has them: weights are read completely in every step,
// and with small pages each 4 KiB would cost a page walk. Small allocations share a huge page, which is returned to the
// system with the last of them. Throws std::bad_alloc.
std::shared_ptr<void> allocate_weights(size_t bytes);

}  // namespace octavo
