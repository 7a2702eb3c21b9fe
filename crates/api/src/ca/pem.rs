//! PEM, the text form of certificates and revocation lists (RFC 7468).

/// Characters of a line, except the last.
const LINE_LENGTH: usize = 64;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Returns a certificate (DER) in PEM.
pub fn certificate_to_pem(der: &[u8]) -> String {
    to_pem("CERTIFICATE", der)
}

/// Returns a revocation list (DER) in PEM.
pub fn revocation_list_to_pem(der: &[u8]) -> String {
    to_pem("X509 CRL", der)
}

fn to_pem(label: &str, der: &[u8]) -> String {
    let digits = base64(der);
    let lines = digits.as_bytes().chunks(LINE_LENGTH);
    let body: String = lines
        .map(|line| String::from_utf8_lossy(line).into_owned() + "\n")
        .collect();
    format!("-----BEGIN {label}-----\n{body}-----END {label}-----\n")
}

/// Returns base64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    let mut digits = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let mut padded = [0; 4];
        padded[1..=group.len()].copy_from_slice(group);
        let number = u32::from_be_bytes(padded);
        for position in 0..4 {
            let digit = number >> (18 - 6 * position) & 0x3f;
            digits.push(match position <= group.len() {
                true => char::from(ALPHABET[digit as usize]),
                false => '=',
            });
        }
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_rfc_4648_are_encoded() {
        for (bytes, digits) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), digits);
        }
    }

    #[test]
    fn certificate_has_the_text_that_the_authority_writes() {
        let dir = tempfile::tempdir().unwrap();
        let authority = crate::ca::CertificateAuthority::init(dir.path(), "web").unwrap();
        let key = crate::ca::NodeKey::generate().unwrap();
        let request = key.request("n1").unwrap();
        let request = crate::ca::CertificateRequest::from_der(&request.der).unwrap();
        let signed = authority.sign(&request, 1).unwrap();
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines(&certificate_to_pem(&signed.der)), lines(&signed.pem));
    }
}
