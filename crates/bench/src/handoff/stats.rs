//! Medians and the like.

/// Values in order.
pub struct Quantiles {
    values: Vec<f64>,
}

impl Quantiles {
    /// Of these values, in any order.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { values }
    }

    /// The value below which this share (0 to 1) of them lies; 0 when there is none.
    pub fn at(&self, share: f64) -> f64 {
        let last = self.values.len().saturating_sub(1);
        let index = (share * last as f64).ceil() as usize;
        self.values.get(index.min(last)).copied().unwrap_or(0.0)
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        self.at(0.5)
    }
}

/// Nanoseconds in microseconds.
pub fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

/// What the clients compared.
#[derive(Debug, Default, Clone, Copy)]
pub struct Verified {
    /// Bytes that were compared.
    pub verified: u64,
    /// Bytes that differed, or never came.
    pub wrong: u64,
}
