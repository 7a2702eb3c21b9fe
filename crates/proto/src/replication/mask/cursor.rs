//! A position in an output, as far as a mask needs to know it.

use super::{Mask, MaskStep, PATTERNS_MAX, VaryingMessageType};

/// State of a mask's matching after some bytes of one leg's output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MaskCursor {
    /// Index of the present step; the number of steps or more after the last one.
    step: u8,
    /// Bytes of the present step that were read.
    read: u32,
    message: MessagePhase,
    /// Matched bytes of each pattern.
    matched: [u8; PATTERNS_MAX],
    /// Bytes after a matched pattern that are still masked.
    masked_left: u32,
}

/// The place within a message of [`MaskStep::Messages`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum MessagePhase {
    #[default]
    Kind,
    Length {
        kind: u8,
        read: u8,
        value: u32,
    },
    Payload {
        kind: u8,
        left: u32,
        compared_left: u32,
    },
}

/// The effect of a step on the next byte.
enum Effect {
    Compared,
    Masked,
    /// The byte belongs to the next step.
    NextStep,
    /// The output is not of the described kind.
    EndOfSteps,
}

impl MaskCursor {
    /// Advances over the next byte. Returns true if the byte is compared, and false if it may differ.
    pub fn advance(&mut self, mask: &Mask, byte: u8) -> bool {
        while let Some(step) = mask.steps.get(usize::from(self.step)) {
            match self.apply(step, byte) {
                Effect::Compared => return true,
                Effect::Masked => return false,
                Effect::NextStep => self.begin_step(self.step + 1),
                Effect::EndOfSteps => self.begin_step(u8::MAX),
            }
        }
        self.match_patterns(mask, byte)
    }

    fn begin_step(&mut self, step: u8) {
        self.step = step;
        self.read = 0;
        self.message = MessagePhase::Kind;
    }

    fn apply(&mut self, step: &MaskStep, byte: u8) -> Effect {
        match step {
            MaskStep::Compared { bytes } if self.read < *bytes => {
                self.read += 1;
                Effect::Compared
            }
            MaskStep::Masked { bytes } if self.read < *bytes => {
                self.read += 1;
                Effect::Masked
            }
            MaskStep::Compared { .. } | MaskStep::Masked { .. } => Effect::NextStep,
            MaskStep::Expected { byte: expected } if *expected == byte => {
                self.begin_step(self.step + 1);
                Effect::Compared
            }
            MaskStep::Expected { .. } => Effect::EndOfSteps,
            MaskStep::Through { byte: last } => {
                if *last == byte {
                    self.begin_step(self.step + 1);
                }
                Effect::Compared
            }
            MaskStep::RunOf { byte: repeated } if *repeated == byte => Effect::Compared,
            MaskStep::RunOf { .. } => Effect::NextStep,
            MaskStep::Messages { masked, last } => self.read_message(masked, *last, byte),
        }
    }

    fn read_message(&mut self, masked: &[VaryingMessageType], last: u8, byte: u8) -> Effect {
        match self.message {
            MessagePhase::Kind => {
                self.message = MessagePhase::Length {
                    kind: byte,
                    read: 0,
                    value: 0,
                };
                Effect::Compared
            }
            MessagePhase::Length { kind, read, value } => {
                let value = value << 8 | u32::from(byte);
                if read < 3 {
                    let read = read + 1;
                    self.message = MessagePhase::Length { kind, read, value };
                    return Effect::Compared;
                }
                let Some(left) = value.checked_sub(4) else {
                    return Effect::EndOfSteps;
                };
                let rule = masked.iter().find(|rule| rule.kind == kind);
                let compared_left = rule.map_or(u32::MAX, |rule| rule.compared);
                self.continue_message(kind, left, compared_left, last);
                Effect::Compared
            }
            MessagePhase::Payload {
                kind,
                left,
                compared_left,
            } => {
                self.continue_message(kind, left - 1, compared_left.saturating_sub(1), last);
                match compared_left {
                    0 => Effect::Masked,
                    _ => Effect::Compared,
                }
            }
        }
    }

    /// Sets the phase within a message, of whose payload `left` bytes follow.
    fn continue_message(&mut self, kind: u8, left: u32, compared_left: u32, last: u8) {
        match left {
            0 if kind == last => self.begin_step(self.step + 1),
            0 => self.message = MessagePhase::Kind,
            _ => {
                self.message = MessagePhase::Payload {
                    kind,
                    left,
                    compared_left,
                };
            }
        }
    }

    fn match_patterns(&mut self, mask: &Mask, byte: u8) -> bool {
        if self.masked_left > 0 {
            self.masked_left -= 1;
            return false;
        }
        let mut masked = None;
        for (compiled, matched) in mask.patterns.iter().zip(&mut self.matched) {
            *matched = compiled.matched_after(*matched, byte);
            if usize::from(*matched) == compiled.pattern.text.len() {
                masked = masked.max(Some(compiled.pattern.masked));
            }
        }
        if let Some(masked) = masked {
            self.matched = [0; PATTERNS_MAX];
            self.masked_left = masked;
        }
        true
    }
}
