//! Keys that may be absent: the configuration keeps its default then.

use std::time::Duration;

use holdfast_proto::registrar::LifeUnit;
use serde::Deserialize;

/// Unit of a registration's life, as written.
#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
pub(super) enum LifeUnitKey {
    Milliseconds,
    Seconds,
}

impl From<LifeUnitKey> for LifeUnit {
    fn from(written: LifeUnitKey) -> LifeUnit {
        match written {
            LifeUnitKey::Milliseconds => LifeUnit::Milliseconds,
            LifeUnitKey::Seconds => LifeUnit::Seconds,
        }
    }
}

pub(super) fn set_if_present<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

pub(super) fn set_ms(target: &mut Duration, value: Option<u64>) {
    set_if_present(target, value.map(Duration::from_millis));
}
