//! The Vulkan instance: loader, optional validation layer, and the list of adapters.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use kiln_system::os::PORTABILITY_DRIVERS;
use vulkanalia::Version;
use vulkanalia::prelude::v1_2::*;
use vulkanalia::vk::ExtDebugUtilsExtensionInstanceCommands as _;

use crate::error::vulkan;
use crate::{Cache, Error, icd};

const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

/// Messages of the validation layer, in order.
#[derive(Debug, Default)]
pub(crate) struct Messages(Mutex<Vec<String>>);

impl Messages {
    fn push(&self, text: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A Vulkan instance.
pub struct Instance {
    pub(crate) raw: vulkanalia::Instance,
    messages: Box<Messages>,
    messenger: Option<vk::DebugUtilsMessengerEXT>,
    /// Kept so that the loader's library outlives every call.
    _entry: Entry,
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Instance {{ debug: {} }}", self.messenger.is_some())
    }
}

impl Instance {
    /// Loads Vulkan. With `KILN_VALIDATION` set (not `0`) the validation layer is switched on and its messages kept.
    pub fn new(cache: &Cache) -> Result<Arc<Instance>, Error> {
        if cfg!(not(feature = "compiler")) {
            return Err(Error::CpuOnly);
        }
        icd::help_headless_nvidia(cache);
        let no_loader = |detail: String| Error::NoLoader { detail };
        let entry = crate::loader::open().map_err(no_loader)?;
        let validate = kiln_system::environment::is_on("KILN_VALIDATION");
        let messages = Box::new(Messages::default());

        let application =
            vk::ApplicationInfo::builder().application_name(b"kiln\0").api_version(Version::new(1, 3, 0).into());
        let mut layers = Vec::new();
        let mut extensions = Vec::new();
        if validate {
            // SAFETY: no requirements beyond a loaded entry.
            let offered = unsafe { entry.enumerate_instance_layer_properties() }
                .map_err(vulkan("vkEnumerateInstanceLayerProperties"))?;
            if !offered.iter().any(|l| l.layer_name.as_cstr() == VALIDATION) {
                return Err(no_loader("KILN_VALIDATION is set, but there is no validation layer".into()));
            }
            layers.push(VALIDATION.as_ptr());
            extensions.push(vk::EXT_DEBUG_UTILS_EXTENSION.name.as_ptr());
        }
        let mut flags = vk::InstanceCreateFlags::empty();
        if PORTABILITY_DRIVERS && offers(&entry, &vk::KHR_PORTABILITY_ENUMERATION_EXTENSION)? {
            extensions.push(vk::KHR_PORTABILITY_ENUMERATION_EXTENSION.name.as_ptr());
            flags |= vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR;
        }
        let mut debug = messenger_info(&messages);
        let mut info = vk::InstanceCreateInfo::builder()
            .flags(flags)
            .application_info(&application)
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions);
        if validate {
            info = info.push_next(&mut debug);
        }
        // SAFETY: every pointer of the create info lives until the call returns, the messages as long as the instance.
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(|result| match result {
            vk::ErrorCode::INCOMPATIBLE_DRIVER => Error::NoDevice,
            result => vulkan("vkCreateInstance")(result),
        })?;
        let messenger = if validate {
            // SAFETY: the extension is enabled; the boxed messages outlive the messenger (see Drop).
            let made = unsafe { raw.create_debug_utils_messenger_ext(&messenger_info(&messages), None) };
            Some(made.map_err(vulkan("vkCreateDebugUtilsMessengerEXT"))?)
        } else {
            None
        };
        log::debug!("Vulkan instance made");
        Ok(Arc::new(Instance { raw, messages, messenger, _entry: entry }))
    }

    /// Whether debug labels and validation are on.
    pub(crate) fn has_debug(&self) -> bool {
        self.messenger.is_some()
    }

    /// What the validation layer has said so far; empty where it is off.
    pub fn validation_messages(&self) -> Vec<String> {
        self.messages.all()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: devices hold an Arc of the instance, so none is left; the messenger goes before the instance.
        unsafe {
            if let Some(messenger) = self.messenger {
                self.raw.destroy_debug_utils_messenger_ext(messenger, None);
            }
            self.raw.destroy_instance(None);
        }
    }
}

/// Whether the loader offers an extension of instances.
fn offers(entry: &Entry, extension: &vk::Extension) -> Result<bool, Error> {
    // SAFETY: no requirements beyond a loaded entry.
    let offered = unsafe { entry.enumerate_instance_extension_properties(None) };
    let offered = offered.map_err(vulkan("vkEnumerateInstanceExtensionProperties"))?;
    Ok(offered.iter().any(|one| one.extension_name == extension.name))
}

fn messenger_info(messages: &Messages) -> vk::DebugUtilsMessengerCreateInfoEXTBuilder<'static> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
    let mut info = vk::DebugUtilsMessengerCreateInfoEXT::builder()
        .message_severity(Severity::WARNING | Severity::ERROR)
        // General messages are the loader's, about drivers and layers of the machine: they say nothing about Kiln's own calls.
        .message_type(Type::VALIDATION)
        .user_callback(Some(collect));
    info.user_data = std::ptr::from_ref(messages).cast_mut().cast();
    info
}

/// Keeps a message of the layer.
extern "system" fn collect(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer hands a valid message, and `user` is the instance's boxed `Messages`, which outlives it.
    let (text, messages) = unsafe { (CStr::from_ptr((*data).message), &*user.cast::<Messages>()) };
    messages.push(text.to_string_lossy().into_owned());
    vk::FALSE
}
