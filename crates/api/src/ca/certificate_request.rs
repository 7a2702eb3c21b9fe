//! Keys of nodes, and requests for certificates (PKCS #10, RFC 2986).
//!
//! A node makes its key itself. The authority gets the public key and the node's name in a request that is signed with
//! the private key, which proves that the sender has that key. Everything else in a certificate is the authority's choice.

use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DnType, KeyPair, PKCS_ECDSA_P256_SHA256,
    PublicKey, SanType,
};

use super::{CaError, check_name, node_dns_name};

/// Maximum length of a request, in bytes. A request with a key on P-256 has about 250.
pub const REQUEST_BYTES_MAX: usize = 4_096;

/// First line of a request in a PEM file (RFC 7468, section 7).
const PEM_LABEL: &str = "-----BEGIN CERTIFICATE REQUEST-----";

/// Reason for refusing a certificate request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request is longer than [`REQUEST_BYTES_MAX`].
    #[error(
        "a request of {0} bytes is longer than {REQUEST_BYTES_MAX}; make it with `holdfast node join`"
    )]
    TooLong(usize),
    /// The bytes are not a request, or the signature in the request is not of the private key.
    #[error("not a certificate request ({0}); make it with `holdfast node join`")]
    Malformed(String),
    /// The key is not on P-256.
    #[error(
        "the key of the request is not an ECDSA key on P-256; make it with `holdfast node join`"
    )]
    OtherKey,
    /// The request names no node, or more than that.
    #[error("the request must name one node and nothing else; make it with `holdfast node join`")]
    Name,
}

/// The private key of a node: ECDSA on P-256.
pub struct NodeKey(KeyPair);

impl NodeKey {
    /// Makes a new key.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn generate() -> Result<NodeKey, CaError> {
        Ok(NodeKey(KeyPair::generate()?))
    }

    /// Reads a node's private key in PEM.
    ///
    /// # Errors
    /// The text is not a private key in PEM.
    pub fn from_pem(pem: &str) -> Result<NodeKey, CaError> {
        Ok(NodeKey(KeyPair::from_pem(pem)?))
    }

    /// Returns the node's private key in PEM.
    pub fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// Returns a request for a certificate of node `name` with this key.
    ///
    /// # Errors
    /// `name` is not a name.
    pub fn request(&self, name: &str) -> Result<SignedRequest, CaError> {
        check_name(name)?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("node:{name}"));
        let dns_name = Ia5String::try_from(node_dns_name(name))?;
        params.subject_alt_names = vec![SanType::DnsName(dns_name)];
        let request = params.serialize_request(&self.0)?;
        Ok(SignedRequest {
            pem: request.pem()?,
            der: request.der().to_vec(),
        })
    }
}

impl std::fmt::Debug for NodeKey {
    fn fmt(&self, text: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        text.write_str("NodeKey")
    }
}

/// A request as its sender has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedRequest {
    /// The request in DER.
    pub der: Vec<u8>,
    /// The request in PEM.
    pub pem: String,
}

/// A request as the authority has it: the signature and the name are checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateRequest {
    name: String,
    pub(super) public_key: PublicKey,
}

impl CertificateRequest {
    /// Reads and checks a request in DER.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn from_der(der: &[u8]) -> Result<CertificateRequest, RequestError> {
        if der.len() > REQUEST_BYTES_MAX {
            return Err(RequestError::TooLong(der.len()));
        }
        CertificateRequest::check(CertificateSigningRequestParams::from_der(&der.into()))
    }

    /// Reads and checks a request in PEM.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn from_pem(pem: &str) -> Result<CertificateRequest, RequestError> {
        // Base64 needs a third more, besides line ends and the two lines of the label.
        if pem.len() > 2 * REQUEST_BYTES_MAX {
            return Err(RequestError::TooLong(pem.len()));
        }
        if !pem.contains(PEM_LABEL) {
            let problem = format!("there is no line `{PEM_LABEL}`");
            return Err(RequestError::Malformed(problem));
        }
        CertificateRequest::check(CertificateSigningRequestParams::from_pem(pem))
    }

    /// Checks the content of a request whose signature was verified.
    fn check(
        verified: Result<CertificateSigningRequestParams, rcgen::Error>,
    ) -> Result<CertificateRequest, RequestError> {
        let request = verified.map_err(|error| RequestError::Malformed(error.to_string()))?;
        if *rcgen::PublicKeyData::algorithm(&request.public_key) != PKCS_ECDSA_P256_SHA256 {
            return Err(RequestError::OtherKey);
        }
        let [SanType::DnsName(dns_name)] = &request.params.subject_alt_names[..] else {
            return Err(RequestError::Name);
        };
        let name = dns_name.as_str().strip_suffix(&node_dns_name(""));
        let name = name.filter(|name| check_name(name).is_ok());
        Ok(CertificateRequest {
            name: name.ok_or(RequestError::Name)?.to_owned(),
            public_key: request.public_key,
        })
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the public key: the uncompressed point (SEC 1, section 2.3.3).
    pub fn public_key(&self) -> &[u8] {
        rcgen::PublicKeyData::der_bytes(&self.public_key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_carries_name_and_key() {
        let key = NodeKey::generate().unwrap();
        let signed = key.request("n2").unwrap();
        let request = CertificateRequest::from_der(&signed.der).unwrap();
        assert_eq!(request.name(), "n2");
        assert_eq!(request.public_key(), key.0.public_key_raw());
        assert_eq!(CertificateRequest::from_pem(&signed.pem).unwrap(), request);
        let same = NodeKey::from_pem(&key.to_pem()).unwrap();
        assert_eq!(same.0.public_key_raw(), key.0.public_key_raw());
        assert!(key.request("N2").is_err());
    }

    #[test]
    fn changed_byte_gives_no_other_name_or_key() {
        let signed = NodeKey::generate().unwrap().request("n2").unwrap();
        let request = CertificateRequest::from_der(&signed.der).unwrap();
        for position in 0..signed.der.len() {
            let mut changed = signed.der.clone();
            changed[position] ^= 1;
            // Name and key are under the signature. A changed byte elsewhere may stand for the same content.
            if let Ok(accepted) = CertificateRequest::from_der(&changed) {
                assert_eq!(accepted, request, "byte {position}");
            }
        }
    }

    #[test]
    fn request_with_more_than_a_node_name_is_refused() {
        let key = KeyPair::generate().unwrap();
        let request = |names: Vec<SanType>| {
            let mut params = CertificateParams::default();
            params.subject_alt_names = names;
            let der = params.serialize_request(&key).unwrap().der().to_vec();
            CertificateRequest::from_der(&der)
        };
        let dns = |name: &str| SanType::DnsName(name.to_owned().try_into().unwrap());
        assert!(request(vec![dns("n2.node")]).is_ok());
        for names in [
            vec![],
            vec![dns("n2.node"), dns("n1.node")],
            vec![dns("n2.node"), SanType::IpAddress([10, 0, 0, 1].into())],
            vec![dns("n2.example")],
            vec![dns("*.node")],
            vec![dns("ca.node")],
        ] {
            assert_eq!(request(names.clone()), Err(RequestError::Name), "{names:?}");
        }
    }

    #[test]
    fn long_or_foreign_input_is_refused() {
        let long = vec![0x30; REQUEST_BYTES_MAX + 1];
        assert_eq!(
            CertificateRequest::from_der(&long),
            Err(RequestError::TooLong(long.len()))
        );
        for text in [
            "",
            "text",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ] {
            assert!(CertificateRequest::from_pem(text).is_err(), "{text}");
        }
        let other = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::DnsName("n2.node".to_owned().try_into().unwrap())];
        let der = params.serialize_request(&other).unwrap().der().to_vec();
        assert_eq!(
            CertificateRequest::from_der(&der),
            Err(RequestError::OtherKey)
        );
    }
}
