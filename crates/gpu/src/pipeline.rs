//! Pipelines: made when asked for, one per shader, several at once at load. SPIR-V and the driver's own pipeline
//! cache are kept on disk, so a second start compiles nothing.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use vulkanalia::prelude::v1_2::*;

use crate::error::vulkan;
use crate::{Adapter, Cache, Device, Error, Shader, Statistic, SubgroupRequest, cache, compile, spirv, statistics};

/// Pipelines that take longer are named in the log.
const SLOW: std::time::Duration = std::time::Duration::from_secs(5);

/// Compilations that take longer are announced.
const NOTICE: std::time::Duration = std::time::Duration::from_secs(1);

/// A compiled kernel.
#[derive(Debug)]
pub struct Pipeline {
    pub(crate) raw: vk::Pipeline,
    /// The variant's name.
    pub name: String,
    /// Whether the kernel waits for those before it by itself.
    pub(crate) launches_dependent: bool,
    /// What the driver tells of it; empty unless the device was opened to compile, or with `KILN_STATISTICS=1`.
    pub statistics: Vec<Statistic>,
}

/// How much work making pipelines was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PipelineCounts {
    /// Shaders compiled from GLSL (not found in the cache).
    pub glsl_compiled: u64,
    /// Pipelines the driver had to compile: not found in the stored pipeline cache. Where a driver never reports hits,
    /// those that no earlier run had stored count.
    pub driver_compiled: u64,
    /// Pipelines in all.
    pub made: u64,
}

/// The pipelines of a device.
#[derive(Default)]
pub(crate) struct Pipelines {
    made: Mutex<HashMap<Shader, Arc<Pipeline>>>,
    /// Keys of the SPIR-V modules that earlier runs stored with the driver's cache, and those of this run.
    stored: HashSet<String>,
    used: Mutex<HashSet<String>>,
    /// Held while the common cache takes in another.
    merging: Mutex<()>,
    glsl_compiled: AtomicU64,
    hits: AtomicU64,
    unknown: AtomicU64,
}

impl Device {
    /// The pipeline of a shader, made now if it is new.
    pub fn pipeline(&self, shader: &Shader) -> Result<Arc<Pipeline>, Error> {
        let made =
            |this: &Self| this.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner).get(shader).cloned();
        if let Some(pipeline) = made(self) {
            return Ok(pipeline);
        }
        // Made outside the lock, so that several threads can make different ones. Where two make the same one, the
        // first stays and the other is dropped.
        let start = std::time::Instant::now();
        let pipeline = Arc::new(self.make(shader)?);
        if start.elapsed() > SLOW {
            log::info!("{}: {:.1} s to compile {:?}", shader.name, start.elapsed().as_secs_f64(), shader.defines);
        }
        let mut all = self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = all.get(shader) {
            // SAFETY: just made and never used.
            unsafe { self.raw.destroy_pipeline(pipeline.raw, None) };
            return Ok(Arc::clone(first));
        }
        all.insert(shader.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    /// Makes the pipelines of all these shaders, on all cores. `done` is told after each.
    pub fn prepare(&self, shaders: &[Shader], done: &(dyn Fn() + Sync)) -> Result<(), Error> {
        let different: HashSet<&Shader> = shaders.iter().collect();
        let (count, start, told) = (different.len(), std::time::Instant::now(), std::sync::Once::new());
        different.into_par_iter().try_for_each(|shader| {
            self.pipeline(shader)?;
            // A first start takes seconds, and minutes on some drivers; a later one a moment.
            if start.elapsed() > NOTICE {
                told.call_once(|| {
                    let name = &self.adapter.name;
                    log::info!(target: "kiln::note", "compiling {count} kernels for {name}; the next start has them ready");
                });
            }
            done();
            Ok(())
        })
    }

    /// What making pipelines has cost so far.
    pub fn pipeline_counts(&self) -> PipelineCounts {
        PipelineCounts {
            glsl_compiled: self.pipelines.glsl_compiled.load(Ordering::Relaxed),
            driver_compiled: self.driver_compiled(),
            made: self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
        }
    }

    /// The SPIR-V of a shader, from the cache or compiled.
    fn spirv(&self, shader: &Shader) -> Result<(Vec<u32>, String), Error> {
        let text = self.sources.expand(shader)?;
        let newer = self.adapter.api_version >= (1, 3, 0);
        let key = cache::key(&[text.body.as_bytes(), &[u8::from(newer)]]);
        let name = format!("spirv/{key}.spv");
        if let Some(bytes) = self.cache.read(&name)
            && bytes.len() % 4 == 0
        {
            let words = bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
            return Ok((words.collect(), key));
        }
        let module = compile::compile_in_time(&self.sources, &shader.name, text, newer)?;
        self.pipelines.glsl_compiled.fetch_add(1, Ordering::Relaxed);
        let bytes: Vec<u8> = module.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.cache.write(&name, &bytes);
        Ok((module, key))
    }

    fn make(&self, shader: &Shader) -> Result<Pipeline, Error> {
        let (module, key) = self.spirv(shader)?;
        let limit = u64::from(self.adapter.caps.limits.max_shared_bytes);
        let needs = spirv::shared_bytes(&module);
        if needs > limit {
            return Err(Error::OverLimit { name: shader.name.clone(), what: "bytes of shared memory", needs, limit });
        }
        let info = vk::ShaderModuleCreateInfo::builder().code_size(module.len() * 4).code(&module);
        // SAFETY: the module comes from the compiler; the device has the features it declares or the driver refuses.
        let code = unsafe { self.raw.create_shader_module(&info, None) }.map_err(vulkan("vkCreateShaderModule"))?;
        let made = self.make_from(shader, code, key);
        // SAFETY: a pipeline does not need its module once it is made.
        unsafe { self.raw.destroy_shader_module(code, None) };
        made
    }

    fn make_from(&self, shader: &Shader, code: vk::ShaderModule, key: String) -> Result<Pipeline, Error> {
        let mut size = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::builder();
        let mut stage = vk::PipelineShaderStageCreateInfo::builder()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(code)
            .name(b"main\0");
        let subgroups = &self.adapter.caps.subgroups;
        if shader.subgroup != SubgroupRequest::Any && subgroups.full {
            stage = stage.flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS);
        }
        if let SubgroupRequest::Size(n) = shader.subgroup
            && subgroups.size_control
        {
            size = size.required_subgroup_size(n);
            stage = stage.push_next(&mut size);
        }
        let mut feedback = vk::PipelineCreationFeedback::default();
        let mut stages = [vk::PipelineCreationFeedback::default()];
        let mut report = vk::PipelineCreationFeedbackCreateInfo::builder()
            .pipeline_creation_feedback(&mut feedback)
            .pipeline_stage_creation_feedbacks(&mut stages);
        let mut info = vk::ComputePipelineCreateInfo::builder().stage(stage).layout(self.layout);
        if self.tells {
            info = info.flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR);
        }
        let reports = self.adapter.api_version >= (1, 3, 0);
        if reports {
            info = info.push_next(&mut report);
        }
        // Drivers lock a cache while they compile for it, so that several threads would take turns. What is not stored yet is
        // compiled for a cache of its own, which the common one takes in afterwards.
        let own = if self.pipelines.stored.contains(&key) { None } else { self.empty_cache() };
        // SAFETY: module, layout and caches are alive and of this device.
        let made = unsafe { self.raw.create_compute_pipelines(own.unwrap_or(self.pipeline_cache), &[info], None) };
        if let Some(own) = own {
            let _one_at_a_time = self.pipelines.merging.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: both caches are alive, no other thread merges, and `own` is local.
            unsafe {
                if made.is_ok() && self.raw.merge_pipeline_caches(self.pipeline_cache, &[own]).is_err() {
                    log::warn!(
                        "{}: the driver would not store this pipeline; it is compiled again next time",
                        shader.name
                    );
                }
                self.raw.destroy_pipeline_cache(own, None);
            }
        }
        let (pipelines, _) = made.map_err(vulkan("vkCreateComputePipelines"))?;
        let told = if self.tells { statistics::of(&self.raw, pipelines[0]) } else { Vec::new() };
        if statistics::asked() {
            let told = told.iter().map(|one| format!("{} {}", one.name, one.value)).collect::<Vec<_>>().join(", ");
            log::warn!("{}: {told}", shader.name);
        }
        let hit = vk::PipelineCreationFeedbackFlags::APPLICATION_PIPELINE_CACHE_HIT;
        if reports && feedback.flags.contains(vk::PipelineCreationFeedbackFlags::VALID) && feedback.flags.contains(hit)
        {
            self.pipelines.hits.fetch_add(1, Ordering::Relaxed);
        }
        if !self.pipelines.stored.contains(&key) {
            self.pipelines.unknown.fetch_add(1, Ordering::Relaxed);
        }
        self.pipelines.used.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        let launches_dependent = shader.launches_dependent;
        Ok(Pipeline { raw: pipelines[0], name: shader.name.clone(), launches_dependent, statistics: told })
    }

    /// A cache with nothing in it; none where the driver has no memory for it.
    fn empty_cache(&self) -> Option<vk::PipelineCache> {
        // SAFETY: the device is alive; the caller destroys the cache.
        unsafe { self.raw.create_pipeline_cache(&vk::PipelineCacheCreateInfo::default(), None) }.ok()
    }

    fn driver_compiled(&self) -> u64 {
        let made = self.pipelines.used.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        match self.pipelines.hits.load(Ordering::Relaxed) {
            0 => self.pipelines.unknown.load(Ordering::Relaxed),
            hits => made.saturating_sub(hits),
        }
    }

    /// Writes the driver's pipeline cache to disk if anything new was compiled. Called when the device is dropped.
    pub fn save_pipelines(&self) {
        if self.driver_compiled() == 0 {
            return;
        }
        let mut keys = self.pipelines.used.lock().unwrap_or_else(PoisonError::into_inner).clone();
        keys.extend(self.pipelines.stored.iter().cloned());
        let mut keys: Vec<String> = keys.into_iter().collect();
        keys.sort();
        // SAFETY: the cache is alive and internally synchronised.
        if let Ok(data) = unsafe { self.raw.get_pipeline_cache_data(self.pipeline_cache) } {
            let list = keys.join("\n").into_bytes();
            let mut file = (list.len() as u64).to_le_bytes().to_vec();
            file.extend_from_slice(&list);
            file.extend_from_slice(&data);
            self.cache.write(&cache_name(&self.adapter), &file);
        }
    }

    pub(crate) fn destroy_pipelines(&self) {
        for pipeline in self.pipelines.made.lock().unwrap_or_else(PoisonError::into_inner).values() {
            // SAFETY: called when the device goes; commands keep it alive, so none is left that uses a pipeline.
            unsafe { self.raw.destroy_pipeline(pipeline.raw, None) };
        }
    }
}

/// Stands for a device and a driver build in names of the cache.
pub(crate) fn build_key(adapter: &Adapter) -> String {
    let parts = [adapter.uuid.as_bytes(), adapter.driver_uuid.as_bytes(), adapter.driver_version.as_bytes()];
    cache::key(&parts)
}

/// Name of the driver's cache file for this device and driver build.
fn cache_name(adapter: &Adapter) -> String {
    format!("pipelines/{}.bin", build_key(adapter))
}

impl Pipelines {
    /// The driver's cache filled from disk, and the keys of what is in it. Data the driver refuses is dropped.
    pub(crate) fn open(
        raw: &vulkanalia::Device,
        adapter: &Adapter,
        cache: &Cache,
    ) -> Result<(vk::PipelineCache, Pipelines), Error> {
        let file = cache.read(&cache_name(adapter)).unwrap_or_default();
        let (keys, data) = split(&file).unwrap_or_default();
        let stored = String::from_utf8_lossy(keys).lines().map(str::to_owned).collect();
        for (data, stored) in [(data, stored), (&[][..], HashSet::new())] {
            let info = vk::PipelineCacheCreateInfo::builder().initial_data(data);
            // SAFETY: the data has the right checksum and was written by this driver for this device.
            match unsafe { raw.create_pipeline_cache(&info, None) } {
                Ok(made) => return Ok((made, Pipelines { stored, ..Pipelines::default() })),
                Err(e) if data.is_empty() => return Err(vulkan("vkCreatePipelineCache")(e)),
                Err(e) => log::warn!("the driver refused its stored pipeline cache ({e:?}); it will be made anew"),
            }
        }
        unreachable!("the loop ends with empty data, which returns either way")
    }
}

/// The two parts of a cache file: list of keys, driver's data.
fn split(file: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}
