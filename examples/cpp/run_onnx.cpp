// Runs few subnets as ONNX files in OpenVINO, at the speed of a fused Engine, and all others from one .pt2.
//
//   run_onnx model.pt2 cases.pt NUMBER=FILE.onnx ... [repeats]
//
// Subnet NUMBER of the .pt2 runs as FILE.onnx, which subnetact.export.to_onnx wrote and which has its own weights; the
// other subnets run over the weights of the .pt2, which are in memory once. cases.pt is that of run_pt2, for float32
// inputs. OpenVINO comes with `pip install openvino`, headers included. The program compares outputs with Python's,
// within 2e-4 of the largest value, and prints latencies and the memory in use.
#include "cases.h"
#include "subnetact_pt2.h"

#include <ATen/Parallel.h>
#include <openvino/openvino.hpp>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>

// A subnet in an ONNX file. OpenVINO checks shapes and types; what is wrong is an ov::Exception, a std::exception.
class OnnxSubnet {
 public:
  OnnxSubnet(ov::Core& core, const std::string& path)
      : request_(core.compile_model(path, "CPU", ov::hint::inference_precision(ov::element::f32),  // else bfloat16
                                    ov::inference_num_threads(1))
                     .create_infer_request()) {}

  at::Tensor run(const at::Tensor& x) {
    const at::Tensor input = x.to(at::kFloat).contiguous();
    request_.set_input_tensor({ov::element::f32, {input.sizes().begin(), input.sizes().end()}, input.data_ptr<float>()});
    request_.infer();
    ov::Tensor output = request_.get_output_tensor(0);
    const ov::Shape shape = output.get_shape();
    return at::from_blob(output.data<float>(), std::vector<int64_t>(shape.begin(), shape.end()), at::kFloat).clone();
  }

 private:
  ov::InferRequest request_;
};

int main(int argc, char** argv) try {
  if (argc < 4) throw std::runtime_error("usage: run_onnx model.pt2 cases.pt NUMBER=FILE.onnx ... [repeats]");
  at::set_num_threads(1);
  c10::InferenceMode inference;
  const auto cases = read_cases(argv[2]);
  const double before = resident_mib();
  const subnetact::Subnets shared(argv[1]);
  const double loaded = resident_mib();
  ov::Core core;
  std::map<size_t, OnnxSubnet> fast;
  int repeats = 0;
  for (const std::string argument : std::vector<std::string>(argv + 3, argv + argc)) {
    const size_t equals = argument.find('=');
    if (equals == argument.npos) repeats = std::stoi(argument);
    else fast.try_emplace(std::stoul(argument), core, argument.substr(equals + 1));
  }
  const auto run = [&](size_t subnet, const at::Tensor& x) {
    const auto found = fast.find(subnet);
    return found == fast.end() ? shared.run(subnet, {x})[0] : found->second.run(x);
  };

  int wrong = 0;
  const auto batches = cases.at("inputs").toListRef(), outputs = cases.at("outputs").toListRef();
  for (size_t subnet = 0; subnet < outputs.size(); ++subnet) {
    for (size_t batch = 0; batch < batches.size(); ++batch) {
      const at::Tensor x = batches[batch].toListRef()[0].toTensor(), want = outputs[subnet].toListRef()[batch].toTensor();
      const at::Tensor output = run(subnet, x);
      wrong += output.sizes() != want.sizes() || ((output - want).abs().max() > 2e-4 * want.abs().max()).item<bool>();
    }
  }
  std::printf("subnets %zu onnx %zu batches %zu wrong %d\n", outputs.size(), fast.size(), batches.size(), wrong);
  std::printf("resident_mib before %.1f loaded %.1f ran %.1f\n", before, loaded, resident_mib());
  for (size_t batch = 0; repeats && batch < batches.size(); ++batch) {
    std::vector<std::vector<double>> ms(outputs.size(), std::vector<double>(repeats));
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (size_t subnet = 0; subnet < outputs.size(); ++subnet) {  // in turns
        const auto start = std::chrono::steady_clock::now();
        run(subnet, batches[batch].toListRef()[0].toTensor());
        ms[subnet][repeat] = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      }
    }
    for (size_t subnet = 0; subnet < outputs.size(); ++subnet) {
      std::nth_element(ms[subnet].begin(), ms[subnet].begin() + repeats / 2, ms[subnet].end());
      std::printf("subnet %zu batch %zu median_ms %.3f\n", subnet, batch, ms[subnet][repeats / 2]);
    }
  }
  return wrong ? 1 : 0;
} catch (const c10::Error& error) {
  std::cerr << "run_onnx: " << error.what_without_backtrace() << "\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "run_onnx: " << error.what() << "\n";
  return 2;
}
