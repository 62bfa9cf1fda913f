// The plain C interface of the kernels: every struct here has its mirror, field by field, in
// sketchoptim/ops/_native.py. Nothing is allocated for the caller and nothing is kept. A step allocates
// nothing at all: its workspace is the caller's, who has it before anything moves.
#pragma once

#include <cstdint>

#define SKETCHOPTIM_ABI 19

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Kind : int32_t { kNone = 0, kExact = 1, kRowWise = 2, kSketch = 3 };
enum Form : int32_t { kLinear = 0, kPaper = 1, kBucket = 2, kConservative = 3 };

// What is found out about a step among several. Only those that are grouped or ascend are run.
enum Finding : int32_t { kAscends = 0, kIsUnordered = 1, kIsOutside = 2, kIsNotFinite = 3 };

enum Combination : int32_t { kSum = 0, kLeast = 1, kMedian = 2 };

constexpr int32_t kMaxDepth = 32;
constexpr int64_t kMaxQueries = 32;

#pragma GCC visibility push(default)
extern "C" {

// One moment: moment <- decay * moment + weight * value, wherever it is stored.
struct Moment {
  int32_t kind;
  int32_t form;
  int32_t dtype;
  int32_t is_signed;   // median of signed readings, else their minimum
  int32_t is_by_row;   // one number a row, else one a column
  int32_t is_average;  // weight == 1 - decay: move by weight * (value - moment)
  int32_t depth;
  float weight;
  float decay_less_one;
  float scale;
  float inverse_scale;
  uint32_t rounding_key;  // one for a step; see rounding.h
  int64_t width;
  void* data;
  const int64_t* words;  // [depth, 4]
  float* stored_scale;   // where a sketch keeps its scale, its number if it has one for what was
  float* stored_start;   // never written, and its number of writes if its counters are rounded
  int64_t* writes;
};

// The rows of a gradient. Row r of the step is parameter row ids[r] (or first_id + r without ids),
// and its gradient is the sum of values[order[i]] for starts[r] <= i < starts[r + 1] (or values[r]
// itself without starts). Where there are sums, inspect() leaves the gradient of a row with several
// entries in sums[slots[r]], and step() takes it from there: a step without inspect() has no sums.
//
// The gradient of lookups is grouped in any case: order has numbers of outputs, whose gradients lie
// `stride` numbers apart, and each entry is multiplied by its factor and then by the scale.
struct Gradient {
  const void* values;  // [entries, dim]
  const int64_t* ids;
  const uint32_t* starts;
  const uint32_t* order;
  const uint32_t* slots;
  float* sums;  // [rows with several entries, dim]
  const float* factors;  // [entries] in their order, or none
  int64_t rows;
  int64_t first_id;
  int64_t stride;
  float scale;
  int32_t is_of_lookups;
  int32_t dtype;  // that of the parameter, or float32 in move_rows()
};

struct Step {
  void* parameter;  // [n, dim]
  int64_t n;
  double* step_count;
  int64_t dim;
  int32_t dtype;
  int32_t threads;
  Gradient gradient;
  Moment first;
  Moment second;
  float* row_values;  // [rows] or none: mean squares, then the second moments
  // [dim] each, or none: what the factors of columns follow from; their roots as they were before
  // the step, the inverses of those, and the sums of shares, which are found with the mean squares.
  float* columns;
  float* column_roots;
  float* column_inverses;
  int64_t* column_shares;
  uint64_t share_step;  // the number of the step, by which rows are chosen that give shares
  void* workspace;    // of sketchoptim_workspace() bytes, aligned to 64
  float step_size;
  float second_root;
  float eps;
  float weight_decay;
  float shrink;
  float nesterov;
  float clip;
  float largest_gradient;
  int32_t is_maximizing;
  int32_t has_nesterov;
  int32_t has_clip;
  int32_t is_ratio;
  int32_t is_inspected;   // row_values has mean squares, else step() finds them
  int32_t is_stochastic;  // new rows of half precision are rounded by chance, else to nearest
  uint32_t rounding_key;  // one for a step; see rounding.h
  int64_t first_row;   // of the parameter in its table: added to an id that is hashed or rounded by
  int64_t piece_rows;  // of a dense gradient, that one thread takes at a time
  int64_t most_row_values;  // a dense gradient with more rows is taken in pieces
  int32_t finding;  // what is found before it is run; see Finding
  int32_t leaves_shares;  // to the host, which sums them over processes
  int64_t shared;   // rows with several entries
};

// The numbers of a rule, as the host computes them: the constants of an optimizer, and what the
// number of the step makes of them.
struct Rule {
  double step_size;
  double second_root;
  double eps;
  double weight_decay;
  double shrink;
  double nesterov;  // or NaN
  double clip;      // or NaN
  double first_decay;  // or NaN if the first moment does not move
  double first_weight;
  double second_decay;  // or NaN
  double second_weight;
  double is_maximizing;
  double is_ratio;
};

// Rows of one table or of several that were looked up, one table after the other: alone, or in bags.
struct Lookups {
  const int64_t* ids;      // [count]
  const int64_t* offsets;  // [tables * outputs], ascending from 0: where each bag of ids begins; none
                           // if each has one id
  const float* weights;    // [count], or none: a factor of each lookup
  const void* values;      // [outputs, columns]: what was looked up in all tables, or its gradient
  int64_t count;
  int64_t tables;
  int64_t outputs;  // of each table
  int64_t columns;  // of all tables
  int64_t stride;   // numbers between two rows of values
  int32_t is_mean;
  // What is found before the ids are grouped: whether each bag has one id, and the largest magnitude
  // of the values times that of the weights.
  int32_t is_single;
  float largest;
};

// The step of one parameter among several: what is new in each step.
struct Call {
  Step* step;  // parameter and moments; all else is filled in
  const Rule* rule;
  const void* values;
  const int64_t* ids;     // none for a dense gradient, and for one of lookups
  int64_t entries;        // ids, or rows
  Lookups* lookups;       // of this table and perhaps of others; values are those of its columns
  int64_t table;          // its number among those of the lookups
  double scale;           // of the gradient of lookups
  int64_t is_checked;     // gradients must be finite
  int64_t rounding_key;   // of new rows of half precision, or -1: they are rounded to nearest
};

// Steps of different parameters, which share no memory that changes.
struct Calls {
  const Call* call;
  int64_t count;
  int32_t threads;
  int64_t elements_for_threads;  // below this many elements, threads cost more than they save
};



// A search for the `k` best of `count` classes, for each of up to kMaxQueries queries. The score of
// a class is combined from one row of each tables[j]: that of its bucket in hash row j. Rows have
// as many columns as there are queries, rounded up to 16 or 32; the columns beyond are not read.
struct TopClasses {
  const float* tables;   // [members, buckets, columns]
  const int64_t* words;  // [members, 4]
  const int64_t* ids;    // [count], ascending strictly; without them the classes are 0 to count - 1
  int64_t count;
  int64_t buckets;
  int64_t k;  // <= count
  int32_t members;  // <= kMaxDepth
  int32_t queries;
  int32_t combination;
  int32_t threads;
  float* scores;     // [queries, k], highest first, the lower class first among equal scores
  int64_t* classes;  // [queries, k]
};

struct BagTable {
  const void* weight;  // [rows, dim]
  int64_t rows;
  int64_t dim;
  int64_t column;  // of the output, where the columns of this table begin
};

// The sums or means of bags of rows of several tables. All are of one dtype.
struct Bags {
  const BagTable* table;  // [lookups->tables]
  Lookups* lookups;       // without values
  void* output;           // [outputs, columns]
  int32_t dtype;
  int32_t threads;
};

// The logits of some tokens for the classes from first_class on: values + bias, and then
// softcap * tanh(logits / softcap) if softcap > 0.
struct LogitBlock {
  void* values;           // [tokens, classes]
  const float* bias;      // [classes], or none
  const int64_t* target;  // [tokens], among all classes
  int64_t tokens;
  int64_t classes;
  int64_t first_class;
  int32_t dtype;
  int32_t threads;
  float softcap;
  // add_logits():
  float* highest;  // [tokens]
  float* total;    // [tokens]
  float* sum;      // [tokens], or none
  float* chosen;   // [tokens]
  float* product;  // [tokens, dim], or none
  int64_t dim;
  // differentiate_logits():
  const float* logsumexp;    // [tokens]
  const float* coefficient;  // [tokens]
  float target_share;
  float class_share;
};

int32_t sketchoptim_abi();

// Buckets and signs of ids, [depth, count] each.
void sketchoptim_hash(const int64_t* words, int32_t depth, int64_t width, const int64_t* ids,
                      int64_t count, int64_t* buckets, float* signs);

// The random bits of stochastic rounding, [count, dim], each below 2^16.
void sketchoptim_noise(uint32_t key, const int64_t* ids, int64_t count, int64_t dim,
                       uint32_t* noise);

// 1 where ids ascend strictly, as those of a coalesced gradient do; 0 where they do not; -1 where
// one is outside [0, n).
int32_t sketchoptim_ascend(const int64_t* ids, int64_t count, int64_t n);

// Groups equal ids, by ascending id and, within an id, by position. Fills in all of a gradient but
// values and sums; what it then points to lies in the room, which has 3 count + 1 numbers. Its order
// has positions of ids, or for each of them the number in `outputs`, which ascend. Ids lie
// in [0, 2^32), and there are fewer than 2^32. Returns the number of rows with several entries,
// which is the number of sums.
int64_t sketchoptim_group(const int64_t* ids, const uint32_t* outputs, int64_t count, uint64_t* room,
                          Gradient* gradient);

// How many bytes inspect() and step() need for a step; all else of it is filled in.
int64_t sketchoptim_workspace(const Step* step);

// Whether all gradients that would reach the moments are finite; fills row_values, where there are
// any, with the mean square of each row. Changes nothing else.
int32_t sketchoptim_inspect(const Step* step);

// Moves the moments and the rows of the parameter.
void sketchoptim_step(const Step* step);

// The four parts of a step of several parameters. The first three change no parameter and no moment.
// Results are the same for every number of threads.

// Fills the steps in and looks at the ids. Returns how many bytes sketchoptim_group_ids() needs, or
// -(i + 1) if an id of call i is outside its table.
int64_t sketchoptim_check_ids(const Calls* calls);

// Groups equal ids in a room of so many bytes, aligned to 64. Returns how many bytes the next part
// needs.
int64_t sketchoptim_group_ids(const Calls* calls, void* room);

// Shares memory of so many bytes, aligned to 64, among the steps, and looks for gradients that are
// not finite. Returns how many steps have such: they are not run.
int64_t sketchoptim_check_values(const Calls* calls, void* memory);

// Counts the steps, decays what decays as a whole, and moves moments and rows.
void sketchoptim_run(const Calls* calls);

// Whether rows of a dense gradient may come in blocks: that is, whether no moment is a sketch but for
// a conservative one by row.
int32_t sketchoptim_takes_rows(const Step* step);

// A step along a dense gradient that comes in blocks of rows, in any order: begin_rows() once, which
// decays what decays as a whole; move_rows() for each block; end_rows() once. The call has no values,
// and the workspace, of sketchoptim_workspace() bytes, is in use all the while. Nothing is checked or
// counted: that is done before.
void sketchoptim_begin_rows(const Call* call, void* workspace);

// The gradient of rows first_id, first_id + 1 and so on, in the parameter's dtype or float32.
void sketchoptim_move_rows(Step* step, const void* values, int32_t dtype, int64_t first_id,
                           int64_t rows, int32_t threads);
void sketchoptim_end_rows(const Call* call);

// Fills the output: sums or means of rows in float32, in the order of ids. Returns 0; or t + 1 where
// table t has an id outside [0, rows), or -1 where offsets do not ascend from 0 to the number of ids:
// nothing is written then. The result is the same for every number of threads.
int64_t sketchoptim_pool_bags(const Bags* bags);

// Fills scores and classes. The result is the same for every number of threads. Returns whether there
// was memory for the search.
int32_t sketchoptim_top_classes(const TopClasses* search);

// Takes in the logits of a block: `highest` becomes the largest logit of each token so far, `total`
// the sum of e^(logit - highest), `sum` that of logits, and `chosen` the logit of the target if it is
// in the block. With a product, it is rescaled as the total is, and values become
// e^(logit - highest) times the derivative of the cap; without one they stay.
void sketchoptim_add_logits(const LogitBlock* block);

// Replaces values by coefficient * (e^(logit - logsumexp) - class_share - [is target] target_share)
// times the derivative of the cap.
void sketchoptim_differentiate_logits(const LogitBlock* block);
}
#pragma GCC visibility pop
