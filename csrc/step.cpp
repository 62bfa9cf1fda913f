// One step of one parameter, from its raw gradient to its updated rows.
//
// Rows are independent of each other but for what they share in a sketch. A sketch by row is moved
// first, from a list of mean squares. A sketch by element has independent columns, so threads take
// columns where rows have to be in order, and rows everywhere else. Either way each number is
// computed by one thread in one order, and the number of threads changes no bit.
#include <cstring>
#include <memory>

#include "by_row.h"
#include "rows.h"
#include "sweep.h"

namespace {

constexpr int64_t kMostBlockRows = 2048, kBlockBytes = 1 << 18;  // of an L2 cache
constexpr int64_t kPieceOfThreads = 16;  // a piece is this much larger with threads
constexpr int64_t kMostPieceRows = 1 << 17;  // half a megabyte of row values

bool has_linear(const Step& s) { return is_linear(s.first) || is_linear(s.second); }

Squares squares_of(const Step& s) {
  return {s.gradient.ids, s.gradient.first_id, s.gradient.rows, s.first_row, s.row_values};
}

void add(const Step& s) {
  const bool is_second_by_row = is_by_row(s.second);
  if (is_second_by_row && is_linear(s.second)) add_by_row(s.second, squares_of(s), s.threads);
  if (is_linear(s.first) || !is_second_by_row) sweep_rows(s, Sweep::kAdd);
}

void update(const Step& s, const Moment& second_before) {
  if (is_by_row(s.second)) move_by_row(s.second, second_before, squares_of(s), s.threads);
  sweep_rows(s, Sweep::kUpdate);
}

// The part of a step that is about some of its rows.
Step part_of(const Step& s, Span rows) {
  Step part = s;
  Gradient& g = part.gradient;
  g.rows = rows.end - rows.begin;
  g.first_id += rows.begin;
  if (g.ids) g.ids += rows.begin;
  if (g.starts) {
    g.starts += rows.begin;
    g.slots += rows.begin;
  } else {
    g.values = static_cast<const char*>(g.values) + rows.begin * s.dim * bytes_of(s.dtype);
  }
  if (s.row_values) part.row_values += rows.begin;
  return part;
}

bool is_conservative(const Moment& m) { return m.kind == kSketch && m.form == kConservative; }

// Whether rows may go through in blocks: what they share must not change before all have read it.
bool has_free_rows(const Step& s) {
  return !is_element_sketch(s.first) && (s.second.kind == kRowWise || is_conservative(s.second));
}

// Makes room for the sums of rows with several entries, from inspect() to the update.
void keep_sums(Gradient& g, uint32_t* slots, float* sums) {
  uint32_t taken = 0;
  for (int64_t r = 0; r < g.rows; ++r) {
    slots[r] = taken;
    taken += !is_alone(g, r);
  }
  g.slots = slots;
  g.sums = sums;
}

// A step along a gradient that was not inspected, with a second moment by row. The mean squares of
// a block of rows are found while their gradients come into the cache, where the update finds them.
void step_in_blocks(const Step& s) {
  const int64_t row_bytes = std::max<int64_t>(1, s.dim) * 4;  // as float32, like sums
  const int64_t size = std::clamp<int64_t>(kBlockBytes / row_bytes, 1, kMostBlockRows);
  const bool is_raised = is_conservative(s.second);
  // Sums must not take more memory than a copy of the rows.
  const bool keeps_sums = s.gradient.starts && size * s.threads * row_bytes <=
                                                   s.gradient.rows * s.dim * bytes_of(s.dtype);
  if (is_raised) prefetch_counters(s.second, s.gradient.rows);
  in_parallel(s, false, [&](Span rows, Span) {
    std::unique_ptr<float[]> sums(keeps_sums ? new float[size * s.dim] : nullptr);
    uint32_t slots[kMostBlockRows];
    for (int64_t begin = rows.begin; begin < rows.end; begin += size) {
      Step block = part_of(s, {begin, std::min(begin + size, rows.end)});
      block.threads = 1;
      if (keeps_sums) keep_sums(block.gradient, slots, sums.get());
      sketchoptim_inspect(&block);
      if (is_raised)
        read_targets(s.second, squares_of(block), 1);
      else
        move_by_row(s.second, s.second, squares_of(block), 1);
      sweep_rows(block, Sweep::kUpdate);
    }
  });
  if (is_raised) raise_to_targets(s.second, squares_of(s), s.threads);
}

// A step with a second moment by row, along a dense gradient of many rows. One number per row is
// more memory than the sketch, so rows go through in pieces, whose mean squares are computed again.
void step_in_pieces(const Step& s) {
  // Each piece starts threads four times, so with threads a piece is larger than the cache.
  const int64_t wanted = s.threads > 1 ? s.piece_rows * s.threads * kPieceOfThreads : s.piece_rows;
  const int64_t size = std::min({wanted, std::max(s.piece_rows, kMostPieceRows), s.gradient.rows});
  std::unique_ptr<float[]> row_values(new float[size]);
  auto for_pieces = [&](auto visit) {
    for (int64_t begin = 0; begin < s.gradient.rows; begin += size) {
      Step piece = part_of(s, {begin, std::min(begin + size, s.gradient.rows)});
      piece.row_values = row_values.get();
      sketchoptim_inspect(&piece);
      visit(piece);
    }
  };
  if (has_linear(s)) for_pieces(add);
  Moment before = s.second;
  std::unique_ptr<char[]> counters;
  if (is_conservative(s.second)) {
    const int64_t bytes = s.second.depth * s.second.width * bytes_of(s.second.dtype);
    counters.reset(new char[bytes]);
    before.data = std::memcpy(counters.get(), s.second.data, bytes);
  }
  for_pieces([&](const Step& piece) { update(piece, before); });
}

}  // namespace

extern "C" int32_t sketchoptim_abi() { return SKETCHOPTIM_ABI; }

extern "C" void sketchoptim_hash(const int64_t* words, int32_t depth, int64_t width,
                                 const int64_t* ids, int64_t count, int64_t* buckets,
                                 float* signs) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t mixed = mix_id(ids[i]);
    for (int32_t j = 0; j < depth; ++j) {
      buckets[j * count + i] = bucket_of(words + 4 * j, mixed, width);
      signs[j * count + i] = sign_of(words + 4 * j, mixed);
    }
  }
}

extern "C" void sketchoptim_noise(uint32_t key, const int64_t* ids, int64_t count, int64_t dim,
                                  uint32_t* result) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t row_key = rounding_row_key(key, ids[i]);
    for_columns(0, dim, [&](int64_t column, int64_t columns) ALWAYS {
      const WordLanes bits = noise(row_key, column);
      std::memcpy(result + i * dim + column, &bits, columns * sizeof(uint32_t));
    });
  }
}

extern "C" void sketchoptim_step(const Step* step) {
  const Step& s = *step;
  if (is_by_row(s.second) && !s.row_values) return step_in_pieces(s);
  if (is_by_row(s.second) && !s.is_inspected) {
    if (has_free_rows(s)) return step_in_blocks(s);
    sketchoptim_inspect(step);
  }
  if (has_linear(s)) add(s);
  update(s, s.second);
}
