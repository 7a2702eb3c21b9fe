//! What is measured (paper 004 section 4).

use crate::time::Time;

/// What a run showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// In the order of [`Config::windows`](super::Config::windows); one for all of it where there are none.
    pub windows: Vec<Window>,
    /// Delivered messages and fired timers.
    pub events: u64,
    /// Virtual seconds.
    pub simulated_s: f64,
    /// A number that depends on every event: equal exactly for equal runs.
    pub digest: u64,
}

/// Requests that ended within a window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// How many.
    pub requests: u64,
    /// Calculations.
    pub size: f64,
    /// Seconds from being generated until the user knows the result: "the sum of queuing delay, startup delay [...] and processing
    /// time".
    pub handling_s: f64,
    /// Seconds that they waited for the user's requests before them.
    pub queuing_s: f64,
    /// "dequeuing until reception of acceptance acknowledgement".
    pub startup_s: f64,
    /// The sum of the handling speeds, in calculations a second (equation 1).
    pub speeds: f64,
    /// Requests that an element lost and another did.
    pub lost: u64,
    /// Requests that an element in the user's own zone did.
    pub local: u64,
    /// Calculations that elements did within the window, and that they could have done.
    pub done: f64,
    /// See above.
    pub could: f64,
}

/// A request that has ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finished {
    pub(super) size: f64,
    pub(super) generated: Time,
    pub(super) dequeued: Time,
    pub(super) accepted: Time,
    pub(super) ended: Time,
    pub(super) attempts: u32,
    pub(super) local: bool,
}

impl Window {
    pub(super) fn add(&mut self, request: &Finished) {
        let handling = request.ended.since(request.generated).as_secs_f64();
        self.requests += 1;
        self.size += request.size;
        self.handling_s += handling;
        self.queuing_s += request.dequeued.since(request.generated).as_secs_f64();
        self.startup_s += request.accepted.since(request.dequeued).as_secs_f64();
        self.speeds += request.size / handling;
        self.lost += u64::from(request.attempts > 1);
        self.local += u64::from(request.local);
    }

    /// The mean time a request took, in seconds.
    #[must_use]
    pub fn handling_mean_s(&self) -> f64 {
        self.handling_s / self.requests as f64
    }

    /// The handling speed: calculations that were asked for, by the time that users waited for them, in calculations a second.
    #[must_use]
    pub fn speed(&self) -> f64 {
        self.size / self.handling_s
    }

    /// The mean of the requests' handling speeds, to which short requests and long ones count alike.
    #[must_use]
    pub fn speed_of_requests(&self) -> f64 {
        self.speeds / self.requests as f64
    }

    /// The share of the elements' capacity that was used.
    #[must_use]
    pub fn utilisation(&self) -> f64 {
        self.done / self.could
    }

    /// The share of requests that stayed in their user's zone.
    #[must_use]
    pub fn local_share(&self) -> f64 {
        self.local as f64 / self.requests as f64
    }
}
