// One step of one parameter, from its raw gradient to its updated rows.
//
// Rows are independent of each other but for what they share in a sketch. A sketch by row is moved
// first, from a list of mean squares. A sketch by element has independent columns, so threads take
// columns where rows have to be in order, and rows everywhere else. Either way each number is
// computed by one thread in one order, and the number of threads changes no bit.
#include <algorithm>
#include <cstring>

#include "by_row.h"
#include "dense.h"
#include "grouped.h"
#include "rows.h"
#include "sweep.h"

namespace {

constexpr int64_t kPieceOfThreads = 16;  // a piece is this much larger with threads
constexpr int64_t kMostPieceRows = 1 << 17;  // half a megabyte of row values

constexpr int64_t kAlignment = 64;

int64_t bytes_of_counters(const Moment& m) { return m.depth * m.width * bytes_of(m.dtype); }

bool has_linear(const Step& s) { return is_linear(s.first) || is_linear(s.second); }

Squares squares_of(const Step& s) {
  return {s.gradient.ids, s.gradient.first_id, s.gradient.rows, s.first_row, s.row_values};
}

// With mean squares in row_values, unless the sweep finds them itself, row by row: then it reads
// each gradient once. Rows may not share what changes before all of them have read it.
Step inspected(const Step& s) {
  Step result = s;
  const bool is_free = s.second.kind == kRowWise || is_conservative(s.second);
  if (is_by_row(s.second) && !s.is_inspected && (is_element_sketch(s.first) || !is_free)) {
    sketchoptim_inspect(&s);
    result.is_inspected = 1;
  }
  return result;
}

void add(const Step& s) {
  const bool is_second_by_row = is_by_row(s.second);
  if (is_second_by_row && is_linear(s.second)) add_by_row(s.second, squares_of(s), s.threads);
  if (is_linear(s.first) || !is_second_by_row) sweep_rows(s, Sweep::kAdd);
}

void update(const Step& s, const Moment& second_before) {
  const bool squares_follow = is_by_row(s.second) && !s.is_inspected;
  if (squares_follow)
    read_by_row(second_before, squares_of(s), s.threads);
  else if (is_by_row(s.second))
    move_by_row(s.second, second_before, squares_of(s), s.threads);
  if (squares_follow && are_rows_grouped(s))
    move_grouped_rows(s);
  else
    sweep_rows(s, Sweep::kUpdate);
  if (squares_follow) write_by_row(s.second, squares_of(s), s.threads);
}

bool is_in_pieces(const Step& s) { return is_by_row(s.second) && !s.row_values; }

int64_t rows_of_piece(const Step& s) {
  // Each piece starts threads four times, so with threads a piece is larger than the cache.
  const int64_t wanted = s.threads > 1 ? s.piece_rows * s.threads * kPieceOfThreads : s.piece_rows;
  return std::min({wanted, std::max(s.piece_rows, kMostPieceRows), s.gradient.rows});
}

// The workspace, part by part: sizes without memory, pointers with it.
struct Workspace {
  int64_t bytes = 0;
  char* const memory;

  explicit Workspace(void* start) : memory(static_cast<char*>(start)) {}

  void* take(int64_t size) {
    void* part = memory ? memory + bytes : nullptr;
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }

  void take_buffers(const Step& s) { take(std::max(1, s.threads) * buffer_size(s) * 4); }
  float* take_row_values(const Step& s) {
    return static_cast<float*>(take(rows_of_piece(s) * 4));
  }
  void* take_counters(const Step& s) {
    return is_conservative(s.second) ? take(bytes_of_counters(s.second)) : nullptr;
  }
};

// A step with a second moment by row, along a dense gradient of many rows. One number per row is
// more memory than the sketch, so rows go through in pieces, whose mean squares are computed again.
void step_in_pieces(const Step& s) {
  Workspace workspace(s.workspace);
  workspace.take_buffers(s);
  float* row_values = workspace.take_row_values(s);
  void* counters = workspace.take_counters(s);
  // Shares that inspect() has found are found again, with the mean squares.
  if (s.columns) std::fill_n(s.column_shares, s.dim, 0);
  const int64_t size = rows_of_piece(s);
  auto for_pieces = [&](auto visit) {
    Step piece = s;
    piece.row_values = row_values;
    piece.is_inspected = 0;
    for (int64_t begin = 0; begin < s.gradient.rows; begin += size) {
      piece.gradient.first_id = begin;
      piece.gradient.rows = std::min(size, s.gradient.rows - begin);
      piece.gradient.values =
          static_cast<const char*>(s.gradient.values) + begin * s.dim * bytes_of(s.dtype);
      visit(inspected(piece));
    }
  };
  if (has_linear(s)) for_pieces(add);
  Moment before = s.second;
  if (counters) before.data = std::memcpy(counters, s.second.data, bytes_of_counters(s.second));
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

extern "C" int64_t sketchoptim_workspace(const Step* step) {
  if (is_taken_row_by_row(*step)) return workspace_row_by_row(*step);
  Workspace needed(nullptr);
  needed.take_buffers(*step);
  if (is_in_pieces(*step)) {
    needed.take_row_values(*step);
    needed.take_counters(*step);
  }
  return needed.bytes;
}

extern "C" void sketchoptim_step(const Step* step) {
  if (is_taken_row_by_row(*step)) {
    unpack_counters(*step);
    move_rows(*step);
    return pack_counters(*step);
  }
  if (is_in_pieces(*step)) return step_in_pieces(*step);
  const Step s = inspected(*step);
  if (has_linear(s)) add(s);
  update(s, s.second);
}
