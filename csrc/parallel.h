// Loops over torch's own thread pool, so that torch.set_num_threads is honoured, for files that
// include no torch header.
#pragma once

#include <cstdint>
#include <functional>

namespace trellis {

// Calls body(begin, end) on ranges that cover [0, count), at least `grain` long but for the last.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

int thread_count();

}  // namespace trellis
