//! Masks: the parts of a server's output in which legs may differ, such as salts, process numbers and dates.
//!
//! A mask is matched from the first byte of a connection's output on. Its steps describe the beginning, such as a
//! database's greeting; its patterns hold for the rest. A masked part has the same length in every leg: where lengths
//! differ, all later positions differ too, and no mask helps.
//!
//! Only compared bytes decide where the masked ones are. The cursors of two legs therefore agree as long as the outputs
//! are equal apart from masked bytes, and each leg's output can be digested alone.

mod cursor;
mod greetings;

pub use cursor::MaskCursor;

/// Maximum number of steps of a mask.
pub const STEPS_MAX: usize = 16;
/// Maximum number of patterns of a mask.
pub const PATTERNS_MAX: usize = 4;
/// Maximum length of a pattern's text, in bytes.
pub const PATTERN_BYTES_MAX: usize = 32;

/// A part of the beginning of a server's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskStep {
    /// Number of bytes that are compared.
    Compared {
        /// Length in bytes.
        bytes: u32,
    },
    /// Number of bytes that may differ.
    Masked {
        /// Length in bytes.
        bytes: u32,
    },
    /// The next byte is compared. If it is another one, the output is not of the described kind, and the steps end.
    Expected {
        /// Value that the next byte should have.
        byte: u8,
    },
    /// All bytes up to the next one of this value, which is included, are compared.
    Through {
        /// Value of the last byte of the step.
        byte: u8,
    },
    /// All bytes of this value that follow each other are compared. There may be none. The next step begins with a compared
    /// byte, because that byte ends the run.
    RunOf {
        /// Value of the repeated byte.
        byte: u8,
    },
    /// Messages with a type byte and a length: 4 bytes, big endian, counting themselves and the payload. The step ends
    /// after a message of type `last`, and at a length below 4.
    Messages {
        /// The types of messages with a masked payload.
        masked: Vec<VaryingMessageType>,
        /// Type of the last message.
        last: u8,
    },
}

/// A type of message in a server's output whose payload may differ between legs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VaryingMessageType {
    /// The type byte.
    pub kind: u8,
    /// Number of bytes at the beginning of the payload that are compared.
    pub compared: u32,
}

/// A text that may occur anywhere after the steps, and that bytes follow in which legs may differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskPattern {
    /// The text, 1 to [`PATTERN_BYTES_MAX`] bytes.
    pub text: Vec<u8>,
    /// Number of bytes after the text that may differ.
    pub masked: u32,
}

/// A list that cannot be a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MaskError {
    /// The mask has too many steps.
    #[error("a mask has at most {STEPS_MAX} steps, not {0}; merge neighbouring ones")]
    Steps(usize),
    /// The mask has too many patterns.
    #[error("a mask has at most {PATTERNS_MAX} patterns, not {0}; leave some out")]
    Patterns(usize),
    /// A pattern has no text, or too much.
    #[error(
        "a pattern has 1 to {PATTERN_BYTES_MAX} bytes, not {0}; use a distinctive part of the text"
    )]
    PatternLength(usize),
    /// A masked byte would decide where a run ends.
    #[error("no masked byte may follow a run of equal bytes; put a compared byte between them")]
    MaskedAfterRun,
}

/// A mask. The default one compares every byte.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    steps: Vec<MaskStep>,
    patterns: Vec<CompiledPattern>,
}

/// A pattern with the table of Knuth, Morris and Pratt.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CompiledPattern {
    pattern: MaskPattern,
    /// For each prefix of the text the length of its longest proper prefix that is also its suffix.
    borders: Vec<u8>,
}

impl Mask {
    /// Returns a mask with these steps and patterns.
    ///
    /// # Errors
    /// The lists exceed a limit, or a pattern has no text.
    pub fn new(steps: Vec<MaskStep>, patterns: Vec<MaskPattern>) -> Result<Mask, MaskError> {
        if steps.len() > STEPS_MAX {
            return Err(MaskError::Steps(steps.len()));
        }
        if patterns.len() > PATTERNS_MAX {
            return Err(MaskError::Patterns(patterns.len()));
        }
        let mut lengths = patterns.iter().map(|pattern| pattern.text.len());
        if let Some(length) = lengths.find(|length| !(1..=PATTERN_BYTES_MAX).contains(length)) {
            return Err(MaskError::PatternLength(length));
        }
        if steps
            .windows(2)
            .any(|pair| is_run_before_mask(&pair[0], &pair[1]))
        {
            return Err(MaskError::MaskedAfterRun);
        }
        let patterns = patterns.into_iter().map(CompiledPattern::new).collect();
        Ok(Mask { steps, patterns })
    }

    /// Returns the mask of this name: `none`, `mariadb-greeting`, `postgresql-greeting` or `http-date`.
    pub fn by_name(name: &str) -> Option<Mask> {
        match name {
            "none" => Some(Mask::default()),
            "mariadb-greeting" => Some(Mask::mariadb_greeting()),
            "postgresql-greeting" => Some(Mask::postgresql_greeting()),
            "http-date" => Some(Mask::http_date()),
            _ => None,
        }
    }

    /// Returns the first position at which two outputs of one connection differ where they must not; none if one is the
    /// beginning of the other.
    pub fn first_difference(&self, output: &[u8], other: &[u8]) -> Option<usize> {
        let mut cursor = MaskCursor::default();
        let pairs = output.iter().zip(other);
        pairs
            .enumerate()
            .find(|(_, (byte, other))| cursor.advance(self, **byte) && byte != other)
            .map(|(position, _)| position)
    }
}

/// Returns true if the end of a run may depend on a byte that differs between legs.
fn is_run_before_mask(step: &MaskStep, next: &MaskStep) -> bool {
    let may_mask = matches!(
        next,
        MaskStep::Masked { .. } | MaskStep::Compared { bytes: 0 }
    );
    may_mask && matches!(step, MaskStep::RunOf { .. })
}

impl CompiledPattern {
    fn new(pattern: MaskPattern) -> CompiledPattern {
        let text = &pattern.text;
        let mut borders = vec![0u8; text.len()];
        let mut matched = 0;
        for index in 1..text.len() {
            while matched > 0 && text[index] != text[matched] {
                matched = usize::from(borders[matched - 1]);
            }
            if text[index] == text[matched] {
                matched += 1;
            }
            // At most PATTERN_BYTES_MAX.
            borders[index] = matched as u8;
        }
        CompiledPattern { pattern, borders }
    }

    /// Returns the number of matched bytes after another one; the whole length at a match.
    fn matched_after(&self, matched: u8, byte: u8) -> u8 {
        let text = &self.pattern.text;
        let mut matched = usize::from(matched);
        // A whole match is never continued: the caller resets it.
        while matched > 0 && text.get(matched) != Some(&byte) {
            matched = usize::from(self.borders[matched - 1]);
        }
        if text.get(matched) == Some(&byte) {
            matched += 1;
        }
        matched as u8
    }
}

#[cfg(test)]
mod tests;
