//! The unit of a registration's life, for who registers and for who is registered with.

use std::time::Duration;

/// In what a registration's life is counted; nothing in the message tells. All of a scope have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LifeUnit {
    /// rsplib.
    #[default]
    Milliseconds,
    /// RFC 5354 section 3.10.
    Seconds,
}

impl LifeUnit {
    /// A life as it is on the wire: one unit at least.
    pub(crate) fn count(self, life: Duration) -> i32 {
        let count = match self {
            LifeUnit::Seconds => u128::from(life.as_secs()),
            LifeUnit::Milliseconds => life.as_millis(),
        };
        i32::try_from(count.max(1)).unwrap_or(i32::MAX)
    }

    /// The life that a number on the wire means; none: for ever.
    #[inline]
    pub(crate) fn life(self, count: i32) -> Option<Duration> {
        let count = u64::try_from(count).ok()?;
        Some(match self {
            LifeUnit::Milliseconds => Duration::from_millis(count),
            LifeUnit::Seconds => Duration::from_secs(count),
        })
    }
}
