//! Pool policies: rules for choosing among a pool's elements (RFC 5356), and rsplib's private ones.

use super::decoder::{DecodeErrorKind, Reader};
use super::encoder::Writer;
use super::parameter::{self, Parameter};
use std::fmt;
use std::str::FromStr;

macro_rules! figure {
    (weight) => {
        "Weight: relative share of the sessions."
    };
    (priority) => {
        "Priority: elements of higher priority are chosen first."
    };
    (load) => {
        "Load, as a fraction of `u32::MAX`."
    };
    (degradation) => {
        "Increase of the load by one more session, as a fraction of `u32::MAX`."
    };
    (dpf) => {
        "Delay penalty factor: increase of the load per millisecond of distance, as a fraction of `u32::MAX`."
    };
    (distance) => {
        "One-way delay between registrar and element in milliseconds; the registrar fills it in."
    };
}

/// One line for each policy: its number, its short name, its figures in their order on the wire.
macro_rules! policies {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $short:literal $({ $($figure:ident),+ })?;)*) => {
        /// A pool element's figures for its pool's policy (RFC 5356 sections 3 to 5).
        ///
        /// Policies from [`Policy::RandomizedPriorityLeastUsed`] on are rsplib's, in its private range and encoding.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Policy {
            $($(#[$doc])* $name $({ $(#[doc = figure!($figure)] $figure: u32),+ })?,)*
        }

        /// A policy without its figures: the part that all elements of a pool share. Written by its short name, such as
        /// `LU-DPF`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u32)]
        pub enum PolicyKind {
            $($(#[$doc])* $name = $number,)*
        }

        impl Policy {
            /// The policy without its figures.
            pub fn kind(&self) -> PolicyKind {
                match self {
                    $(Policy::$name { .. } => PolicyKind::$name,)*
                }
            }
        }

        impl PolicyKind {
            /// Every policy, in the order of the numbers.
            pub const ALL: &[PolicyKind] = &[$(PolicyKind::$name),*];

            /// Returns the policy with all figures 0: for a pool, where only the kind matters.
            pub fn zeroed(self) -> Policy {
                match self {
                    $(PolicyKind::$name => Policy::$name { $($($figure: 0),+)? },)*
                }
            }

            /// Returns the policy with that number in RFC 5356's table or in rsplib's private range.
            pub fn from_number(number: u32) -> Option<PolicyKind> {
                match number {
                    $($number => Some(PolicyKind::$name),)*
                    _ => None,
                }
            }

            /// Returns the policy's short name, as in rsplib and the papers.
            pub fn name(self) -> &'static str {
                match self {
                    $(PolicyKind::$name => $short,)*
                }
            }
        }

        /// RFC 5354 section 3.8.
        impl Parameter for Policy {
            const KINDS: &'static [u16] = &[parameter::POLICY];

            fn read(value: &mut Reader<'_>) -> Result<Policy, DecodeErrorKind> {
                let policy = match PolicyKind::from_number(value.u32()?) {
                    $(Some(PolicyKind::$name) => Policy::$name { $($($figure: value.u32()?),+)? },)*
                    None => return Err(value.invalid_value()),
                };
                value.expect_end()?;
                Ok(policy)
            }

            fn write(&self, writer: &mut Writer<'_>) {
                writer.u32(self.kind().number());
                match *self {
                    $(Policy::$name { $($($figure),+)? } => { $($(writer.u32($figure);)+)? })*
                }
            }
        }
    };
}

policies! {
    /// In turn.
    RoundRobin = 0x0000_0001, "RR";
    /// In turn, each element as often as its weight.
    WeightedRoundRobin = 0x0000_0002, "WRR" { weight };
    /// At random, with equal probability.
    Random = 0x0000_0003, "RAND";
    /// At random, in proportion to the weights.
    WeightedRandom = 0x0000_0004, "WRAND" { weight };
    /// The highest priority.
    Priority = 0x0000_0005, "PRIO" { priority };
    /// The lowest load; round robin among equals.
    LeastUsed = 0x4000_0001, "LU" { load };
    /// The lowest load; each selection raises the load until the element's next report.
    LeastUsedDegradation = 0x4000_0002, "LUD" { load, degradation };
    /// The lowest load after one more session.
    PriorityLeastUsed = 0x4000_0003, "PLU" { load, degradation };
    /// At random, in proportion to the unused load.
    RandomizedLeastUsed = 0x4000_0004, "RLU" { load };
    /// RLU over the load after one more session.
    RandomizedPriorityLeastUsed = 0xb000_1001, "RPLU" { load, degradation };
    /// RLU with a load that each selection raises.
    RandomizedLeastUsedDegradation = 0xb000_1002, "RLUD" { load, degradation };
    /// PLU with a load that each selection raises.
    PriorityLeastUsedDegradation = 0xb000_1003, "PLUD" { load, degradation };
    /// RPLU with a load that each selection raises.
    RandomizedPriorityLeastUsedDegradation = 0xb000_1004, "RPLUD" { load, degradation };
    /// WRAND, with weights that the distance lowers.
    WeightedRandomDpf = 0xb000_2001, "WRAND-DPF" { weight, dpf, distance };
    /// LU, with a load that the distance raises (paper 004).
    LeastUsedDpf = 0xb000_2002, "LU-DPF" { load, dpf, distance };
    /// LUD, with a load that the distance raises.
    LeastUsedDegradationDpf = 0xb000_2003, "LUD-DPF" { load, degradation, dpf, distance };
    /// PLU, with a load that the distance raises. rsplib has the number but no encoding; this encoding follows
    /// LUD-DPF's.
    PriorityLeastUsedDpf = 0xb000_2004, "PLU-DPF" { load, degradation, dpf, distance };
    /// PLUD, with a load that the distance raises. rsplib has the number but no encoding; this encoding follows
    /// LUD-DPF's.
    PriorityLeastUsedDegradationDpf = 0xb000_2005, "PLUD-DPF" { load, degradation, dpf, distance };
}

impl PolicyKind {
    /// The policy's number in RFC 5356's table or in rsplib's private range.
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not the short name of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a pool policy; use one such as RR, WRR, RAND, WRAND, LU or LU-DPF")]
pub struct PolicyNameError(String);

impl FromStr for PolicyKind {
    type Err = PolicyNameError;

    /// Parses the short name, in upper or lower case.
    fn from_str(text: &str) -> Result<PolicyKind, PolicyNameError> {
        let named = |kind: &&PolicyKind| kind.name().eq_ignore_ascii_case(text);
        PolicyKind::ALL
            .iter()
            .find(named)
            .copied()
            .ok_or_else(|| PolicyNameError(text.chars().take(40).collect()))
    }
}
