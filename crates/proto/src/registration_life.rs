//! The unit of a registration's life, for pool elements and registrars.

use std::time::Duration;

/// Unit of a registration's life. Messages do not carry the unit; all members of an operational scope use the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LifeUnit {
    /// Milliseconds, as rsplib counts.
    #[default]
    Milliseconds,
    /// Seconds, as RFC 5354 section 3.10 says.
    Seconds,
}

impl LifeUnit {
    /// Encodes a life for the wire: at least one unit.
    pub(crate) fn encode(self, life: Duration) -> i32 {
        let count = match self {
            LifeUnit::Seconds => u128::from(life.as_secs()),
            LifeUnit::Milliseconds => life.as_millis(),
        };
        i32::try_from(count.max(1)).unwrap_or(i32::MAX)
    }

    /// Decodes a life from the wire; none means for ever.
    #[inline]
    pub(crate) fn decode(self, count: i32) -> Option<Duration> {
        let count = u64::try_from(count).ok()?;
        Some(match self {
            LifeUnit::Milliseconds => Duration::from_millis(count),
            LifeUnit::Seconds => Duration::from_secs(count),
        })
    }
}
