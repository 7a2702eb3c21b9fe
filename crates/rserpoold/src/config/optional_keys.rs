//! Keys that may be absent: the configuration keeps its default then.

use std::time::Duration;

/// Replaces a default by the value of a key, if the file has it.
pub(super) fn set_if_present<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

/// Replaces a default by the milliseconds of a key, if the file has it.
pub(super) fn set_ms(target: &mut Duration, value: Option<u64>) {
    set_if_present(target, value.map(Duration::from_millis));
}
