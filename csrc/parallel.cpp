#include "parallel.h"

#include <torch/csrc/stable/ops.h>

namespace trellis {

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, body);
}

int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace trellis
