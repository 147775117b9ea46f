// Packing of quantised weights; done once, at load.
#include <cstring>
#include <stdexcept>

#include "arena.hpp"
#include "quant.hpp"
#include "threads.hpp"

namespace octavo {

namespace {
int64_t panel_size(const QuantLayout& layout, int64_t groups) {
  const int64_t blocks = layout.groups == 0 ? 1 : groups / layout.groups;
  return blocks * layout.header + groups * layout.group_bytes();
}

// The matrix's size in groups of 32.
int64_t count_groups(const QuantLayout& layout, int64_t n, int64_t k) {
  if (n < 1 || k < 1) throw std::invalid_argument("a quantised matrix must have rows and columns");
  const int64_t block = int64_t{layout.groups} * kQuantGroup;
  if (block != 0 && k % block != 0) {
    throw std::invalid_argument("the format " + std::string(layout.name) + " needs inputs in multiples of " +
                                std::to_string(block) + ", not " + std::to_string(k));
  }
  return (k + kQuantGroup - 1) / kQuantGroup;
}
}  // namespace

QuantFormat quant_format(const std::string& name) {
  std::string names;
  for (const QuantLayout& layout : kQuantLayouts) {
    if (layout.name == name) return static_cast<QuantFormat>(&layout - kQuantLayouts);
    names += (names.empty() ? "" : ", ") + std::string(layout.name);
  }
  throw std::invalid_argument("unknown format '" + name + "'; known: " + names);
}

PackedQuant::PackedQuant(QuantFormat format, int64_t n, int64_t k, const QuantSource& source)
    : format(format),
      n(n),
      k(k),
      groups(count_groups(layout_of(format), n, k)),
      panels((n + kPanel - 1) / kPanel),
      panel_bytes(panel_size(layout_of(format), groups)) {
  memory_ = allocate_weights(static_cast<size_t>(bytes()));
  data_ = static_cast<uint8_t*>(memory_.get());
  parallel_for(panels, [&](int64_t i) { pack_panel(i, source); });
}

void PackedQuant::pack_panel(int64_t panel, const QuantSource& source) {
  const QuantLayout layout = layout_of(format);
  const int64_t first = panel * kPanel;
  const int columns = static_cast<int>(n - first < kPanel ? n - first : kPanel);
  const int64_t groups_a_block = layout.groups == 0 ? groups : layout.groups;
  const int64_t blocks = groups / groups_a_block;
  const int64_t block_bytes = layout.header + groups_a_block * layout.group_bytes();
  uint8_t* const data = data_ + panel * panel_bytes;

  for (int c = 0; c < columns; ++c) {
    const int64_t row = first + c;
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* header = data + b * block_bytes;
      if (format == QuantFormat::q8_channel) {
        std::memcpy(header + c * 4, static_cast<const float*>(source.scales) + row, 4);
        continue;
      }
      if (format == QuantFormat::mxfp4) {
        header[c] = static_cast<const uint8_t*>(source.scales)[row * blocks + b];
        continue;
      }
      std::memcpy(header + c * 2, static_cast<const uint16_t*>(source.scales) + row * blocks + b, 2);
      if (source.minima != nullptr) std::memcpy(header + 32 + c * 2, source.minima + row * blocks + b, 2);
      if (format == QuantFormat::q4_k) {
        for (int g = 0; g < 8; ++g) {
          header[64 + g * kPanel + c] = source.group_scales[row * groups + b * 8 + g];
          header[192 + g * kPanel + c] = source.group_minima[row * groups + b * 8 + g];
        }
      }
    }
    const uint8_t* codes = source.codes + row * k;
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* out = data + (g / groups_a_block + 1) * layout.header + g * layout.group_bytes() + c * 4;
      const uint8_t* from = codes + g * kQuantGroup;
      const int64_t values = k - g * kQuantGroup < kQuantGroup ? k - g * kQuantGroup : kQuantGroup;
      // A quad at a time, or two of 4 bits.
      int64_t i = 0;
      if (layout.bits == 8) {
        for (; i + 4 <= values; i += 4) {
          uint32_t quad;
          std::memcpy(&quad, from + i, 4);
          quad ^= 0x80808080u;
          std::memcpy(out + i * kPanel, &quad, 4);
        }
      } else {
        for (; i + 8 <= values; i += 8) {
          uint32_t even, odd;
          std::memcpy(&even, from + i, 4);
          std::memcpy(&odd, from + i + 4, 4);
          const uint32_t both = (even & 0x0f0f0f0fu) | (odd & 0x0f0f0f0fu) << 4;
          std::memcpy(out + i / 2 * kPanel, &both, 4);
        }
      }
      for (; i < values; ++i) {
        if (layout.bits == 8) {
          out[i / 4 * (4 * kPanel) + i % 4] = from[i] ^ 0x80;
        } else {
          out[i / 8 * (4 * kPanel) + i % 4] |= static_cast<uint8_t>((from[i] & 15) << (i % 8 < 4 ? 0 : 4));
        }
      }
    }
  }
}

}  // namespace octavo
