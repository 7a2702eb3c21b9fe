//! The head of a request.

/// The parts of a request's head that this server needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub method: String,
    pub path: String,
    /// `Range`, if it applies.
    pub range: Option<String>,
    pub content_length: Option<u64>,
    pub chunked: bool,
    pub expects_continue: bool,
    /// True if the client wants the connection to end with this response.
    pub close: bool,
}

/// Maximum length of a head, in bytes; a longer one is refused.
pub const BYTES_MAX: usize = 16 * 1024;

/// Result of parsing the start of a connection's input.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The head is incomplete.
    Partial,
    /// A head, and its length in bytes.
    Head(Head, usize),
    /// The input is not a valid head.
    Invalid,
}

/// Parses the head at the start of `input`.
pub fn parse(input: &[u8]) -> Parsed {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(input) {
        Ok(httparse::Status::Partial) if input.len() < BYTES_MAX => Parsed::Partial,
        Ok(httparse::Status::Complete(length)) => match to_head(&request) {
            Some(head) => Parsed::Head(head, length),
            None => Parsed::Invalid,
        },
        Ok(httparse::Status::Partial) | Err(_) => Parsed::Invalid,
    }
}

fn to_head(request: &httparse::Request<'_, '_>) -> Option<Head> {
    let values = |name: &'static str| {
        let named = request
            .headers
            .iter()
            .filter(move |header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| std::str::from_utf8(header.value).unwrap_or_default().trim())
    };
    let has = |name, token: &str| {
        values(name).any(|value| {
            value
                .split(',')
                .any(|part| part.trim().eq_ignore_ascii_case(token))
        })
    };
    let chunked = has("transfer-encoding", "chunked");
    // Other codings cannot be decoded here, and two framings at once are an attack (RFC 9112, section 6.1).
    if !chunked && values("transfer-encoding").next().is_some() {
        return None;
    }
    let mut content_length = None;
    for value in values("content-length") {
        let length: u64 = value
            .bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| value.parse().ok())
            .flatten()?;
        if chunked || content_length.is_some_and(|other| other != length) {
            return None;
        }
        content_length = Some(length);
    }
    let is_http_1_0 = request.version == Some(0);
    Some(Head {
        method: request.method?.to_owned(),
        path: request.path?.split('?').next()?.to_owned(),
        // Without validators a conditional range cannot be evaluated, and the whole file is always right (RFC 9110,
        // section 13.1.5).
        range: values("range")
            .next()
            .filter(|_| values("if-range").next().is_none())
            .map(str::to_owned),
        content_length,
        chunked,
        expects_continue: !is_http_1_0 && has("expect", "100-continue"),
        close: has("connection", "close") || (is_http_1_0 && !has("connection", "keep-alive")),
    })
}

/// Returns the range of a file of `size` bytes that is requested: first byte and end (exclusive).
///
/// `Ok(None)` to send the whole file: no range, several, or not in bytes (RFC 9110, section 14.2).
///
/// # Errors
/// When the range cannot be satisfied.
pub fn range(range: Option<&str>, size: u64) -> Result<Option<(u64, u64)>, ()> {
    let Some((first, last)) = range
        .and_then(|range| range.strip_prefix("bytes="))
        .filter(|range| !range.contains(','))
        .and_then(|range| range.trim().split_once('-'))
    else {
        return Ok(None);
    };
    let number = |text: &str| (!text.is_empty()).then(|| text.parse::<u64>().ok());
    let (first, end) = match (number(first), number(last)) {
        (Some(Some(first)), Some(Some(last))) if first <= last => {
            (first, last.saturating_add(1).min(size))
        }
        (Some(Some(first)), None) => (first, size),
        (None, Some(Some(length))) if length > 0 => (size.saturating_sub(length), size),
        (None, Some(Some(_))) => return Err(()),
        _ => return Ok(None),
    };
    if first < end {
        Ok(Some((first, end)))
    } else {
        Err(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_headers_select_the_requested_bytes() {
        let range_of = |text| range(Some(text), 100);
        assert_eq!(range_of("bytes=0-9"), Ok(Some((0, 10))));
        assert_eq!(range_of("bytes=90-"), Ok(Some((90, 100))));
        assert_eq!(range_of("bytes=90-200"), Ok(Some((90, 100))));
        assert_eq!(range_of("bytes=-10"), Ok(Some((90, 100))));
        assert_eq!(range_of("bytes=-200"), Ok(Some((0, 100))));
        assert_eq!(range_of("bytes=100-"), Err(()));
        assert_eq!(range_of("bytes=-0"), Err(()));
        for whole in [
            "bytes=5-4",
            "bytes=a-b",
            "bytes=0-1,5-6",
            "lines=1-2",
            "bytes=-",
        ] {
            assert_eq!(range_of(whole), Ok(None), "{whole}");
        }
        assert_eq!(range(None, 0), Ok(None));
        assert_eq!(range(Some("bytes=0-0"), 0), Err(()));
    }

    #[test]
    fn request_heads_parse() {
        let Parsed::Head(head, length) =
            parse(b"PUT /a?b HTTP/1.1\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\nabc")
        else {
            panic!("a head")
        };
        assert_eq!(
            (head.method.as_str(), head.path.as_str(), length),
            ("PUT", "/a", 62)
        );
        assert_eq!(
            (head.content_length, head.expects_continue, head.close),
            (Some(3), true, false)
        );
        assert_eq!(parse(b"GET / HTTP/1.1\r\nHost"), Parsed::Partial);
        assert_eq!(parse(&[b'G'; BYTES_MAX]), Parsed::Invalid);
        for bad in [
            "GET / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: +3\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
            "\x01\r\n\r\n",
        ] {
            assert_eq!(parse(bad.as_bytes()), Parsed::Invalid, "{bad}");
        }
    }
}
