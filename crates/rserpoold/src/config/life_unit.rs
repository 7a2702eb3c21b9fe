//! Unit of a registration's life.

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
