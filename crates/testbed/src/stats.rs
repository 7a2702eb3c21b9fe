//! Quantiles and counters of compared bytes.

/// Values in ascending order, to read quantiles from.
pub struct Quantiles {
    values: Vec<f64>,
}

impl Quantiles {
    /// Sorts the values for quantiles.
    pub fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { values }
    }

    /// Returns the value below which this share (0 to 1) of the values lies; 0 if there is no value.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.values.len().saturating_sub(1);
        let index = (share * last as f64).ceil() as usize;
        self.values.get(index.min(last)).copied().unwrap_or(0.0)
    }

    /// Returns the median of the values; 0 if there is no value.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// Converts nanoseconds to microseconds.
pub fn nanoseconds_to_us(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

/// Counters of the bytes that the clients compared.
#[derive(Debug, Default, Clone, Copy)]
pub struct VerifiedBytes {
    /// Bytes that were compared.
    pub verified: u64,
    /// Bytes that differed or never arrived.
    pub wrong: u64,
}
