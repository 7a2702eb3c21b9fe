//! Names of DNS zones, and the labels of hosts below: letters, digits and hyphens (RFC 1123 section 2.1).

use std::fmt;
use std::str::FromStr;

use hickory_proto::rr::Name;

/// Maximum length of a label in bytes (RFC 1035 section 2.3.4).
const LABEL_BYTES_MAX: usize = 63;
/// Maximum length of a zone's name in bytes: the longest names below the zone, those of IPv6 addresses, must fit into the
/// 255 bytes of RFC 1035 section 2.3.4.
const ZONE_NAME_BYTES_MAX: usize = 140;

/// One label of a host's name, in lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(String);

/// Reason why a text is not a DNS name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DnsNameError {
    /// The text is not a label.
    #[error(
        "`{0}` is not a label of a name: use 1 to {LABEL_BYTES_MAX} letters, digits and inner hyphens"
    )]
    Label(String),
    /// The name is too long.
    #[error("`{0}` is longer than {ZONE_NAME_BYTES_MAX} bytes")]
    TooLong(String),
}

impl Label {
    /// Returns the label as text, in lower case.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Label {
    type Err = DnsNameError;

    /// Reads a label, in upper or lower case.
    ///
    /// # Errors
    /// The text has other characters than letters, digits and inner hyphens, or is empty or too long.
    fn from_str(text: &str) -> Result<Label, DnsNameError> {
        let is_label = (1..=LABEL_BYTES_MAX).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !text.starts_with('-')
            && !text.ends_with('-');
        match is_label {
            true => Ok(Label(text.to_ascii_lowercase())),
            false => Err(DnsNameError::Label(
                text.chars().take(LABEL_BYTES_MAX).collect(),
            )),
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a DNS zone, such as `example.test`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsZoneName(Name);

impl DnsZoneName {
    /// Returns the name in the form of the DNS library.
    pub(crate) fn name(&self) -> &Name {
        &self.0
    }
}

impl FromStr for DnsZoneName {
    type Err = DnsNameError;

    /// Reads a name, with or without the final dot.
    ///
    /// # Errors
    /// A part of the name is not a label, or the name is too long.
    fn from_str(text: &str) -> Result<DnsZoneName, DnsNameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.len() > ZONE_NAME_BYTES_MAX {
            let start = text.chars().take(ZONE_NAME_BYTES_MAX);
            return Err(DnsNameError::TooLong(start.collect()));
        }
        let mut name = Name::root();
        for label in text.split('.').rev() {
            name = below(label.parse::<Label>()?.as_str(), &name);
        }
        Ok(DnsZoneName(name))
    }
}

/// The name with a final dot.
impl fmt::Display for DnsZoneName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Returns the name of a label below a parent. The length of zones and labels is bounded, so that every name fits.
pub(crate) fn below(label: &str, parent: &Name) -> Name {
    parent
        .prepend_label(label.as_bytes())
        .unwrap_or_else(|_| parent.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_either_case() {
        let zone_name: DnsZoneName = "Example.TEST.".parse().unwrap();
        assert_eq!(zone_name, "example.test".parse().unwrap());
        assert_eq!(zone_name.to_string(), "example.test.");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", ".", "a..b", "-a.test", "a-.test", "a_b.test", "ä.test", "a b",
        ] {
            assert!(text.parse::<DnsZoneName>().is_err(), "{text}");
        }
        let long_label = "a".repeat(LABEL_BYTES_MAX + 1);
        assert!(long_label.parse::<Label>().is_err());
        let long_name = vec!["a".repeat(40); 4].join(".");
        assert_eq!(
            long_name.parse::<DnsZoneName>(),
            Err(DnsNameError::TooLong(long_name[..140].to_owned()))
        );
    }
}
