// Runs a .pt2 of subnetact.export.to_pt2 without Python: weights once, inputs checked, errors are std::exceptions.
#pragma once
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <regex>
namespace subnetact {
inline std::vector<std::string> matches(const std::string& text, const std::regex& pattern, std::vector<int> groups = {0}) {
  return {std::sregex_token_iterator(text.begin(), text.end(), pattern, groups), std::sregex_token_iterator()};
}
struct Subnets {
  at::DeviceType device; std::string facts;  // JSON: inputs, subnets, accuracy, fingerprint, torch, device, capability
  std::vector<std::vector<std::string>> inputs;  // "name:", dtype, and of every axis its size or axis:least:most
  std::vector<std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> programs;
  explicit Subnets(const std::string& path, size_t runners = 1) {  // so many calls of a program run at once
    caffe2::serialize::PyTorchStreamReader file(path);
    const auto record = [&](const std::string& name) {
      const auto [data, size] = file.getRecord(name);
      return std::string(static_cast<const char*>(data.get()), size);
    };
    const std::regex word("[^, ]+"), slice("\"([^\"]+)\": \\[\"(\\w+)\", \\[(.*?)\\], \\[(.*?)\\], (\\d+)");
    const auto made = matches(facts = record("extra/subnetact.json"), std::regex("\"(torch|device|capability)\": \"([^\"+]+)"), {2});
    const std::string here = (device = at::Device(made.at(1)).type()) == at::kCPU ? at::get_cpu_capability() : made.at(2);
    TORCH_CHECK(made[0] == TORCH_VERSION && made[2] == here, path, ": torch ", made[0], " compiled it for ", made[2]);
    for (const std::string& input : matches(facts, std::regex("\"(\\S+: \\w+( [\\w:]+)+)\""), {1})) inputs.push_back(matches(input, word));
    std::map<std::string, at::Tensor> weights;  // whole storages; programs take slices of them
    for (std::string name = "subnet-0", config; file.hasRecord(config = "data/aotinductor/" + name + "/weights_config.json");) {
      std::unordered_map<std::string, at::Tensor> slices;  // by name, of a storage, with sizes and strides, and an offset
      const auto items = matches(record(config), slice, {1, 2, 3, 4, 5});
      for (auto item = items.begin(); item != items.end(); item += 5) {
        std::vector<int64_t> axes[2];
        for (int i : {0, 1}) for (const auto& size : matches(item[2 + i], word)) axes[i].push_back(std::stoll(size));
        const std::string bytes = weights.count(item[1]) ? "" : record("data/weights/" + item[1]);
        if (!bytes.empty()) weights[item[1]] = torch::jit::pickle_load({bytes.begin(), bytes.end()}).toTensor();
        slices[item[0]] = weights[item[1]].as_strided(axes[0], axes[1], std::stoll(item[4]));
      }
      programs.emplace_back(new torch::inductor::AOTIModelPackageLoader(path, name, false, runners));
      programs.back()->load_constants(slices, false, true, /*user_managed=*/true);
      name = "subnet-" + std::to_string(programs.size());
    }
  }
  std::vector<at::Tensor> run(size_t subnet, std::vector<at::Tensor> batch) const {  // a tensor per input, and per output
    TORCH_CHECK(subnet < programs.size(), "no subnet ", subnet, "; this file has 0..", programs.size() - 1);
    TORCH_CHECK(batch.size() == inputs.size(), batch.size(), " inputs were given, this file takes ", inputs.size());
    for (auto [i, sizes] = std::pair<size_t, std::map<std::string, int64_t>>(); i < batch.size(); ++i) {
      const auto& [x, wanted] = std::tie(batch[i], inputs[i]);
      bool right = x.defined() && x.layout() == at::kStrided && x.dim() + 2 == static_cast<int64_t>(wanted.size()) &&
                   c10::getDtypeNames(x.scalar_type()).first == wanted[1] && x.device().type() == device;
      for (int64_t axis = 0; right && axis < x.dim(); ++axis) {
        const std::string& text = wanted[axis + 2];  // "16" and "16:16:16" mean the same
        const int64_t least = std::stoll(text.substr(text.find(':') + 1)), most = std::stoll(text.substr(text.rfind(':') + 1));
        right = least <= x.size(axis) && x.size(axis) <= most && sizes.emplace(text, x.size(axis)).first->second == x.size(axis);
      }
      TORCH_CHECK(right, x.toString(), " ", x.defined() ? x.sizes() : at::IntArrayRef(), " is no ", c10::Join(" ", wanted));
      batch[i] = x.contiguous();
    }
    return programs[subnet]->run(batch);
  }
};
}  // namespace subnetact
