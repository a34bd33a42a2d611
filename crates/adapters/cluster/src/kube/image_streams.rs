//! Reads OpenShift's ImageStreams for each snapshot. They map a system version to its driver toolkit image.

use std::collections::BTreeMap;

use farrier_core::{
    image::checked::{ImageDigest, ImageStream},
    kernel::ImageStreams,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::Value;

use super::{
    super::error::{ApiError, PermissionScope},
    live::KubeCluster,
};

/// Reads the ImageStreams. The entry of a missing or forbidden ImageStream holds the reason. An unavailable API server is an
/// error.
pub(super) async fn image_streams(
    cluster: &KubeCluster,
    names: impl IntoIterator<Item = ImageStream>,
) -> Result<ImageStreams, ApiError> {
    let gvk = GroupVersionKind::gvk("image.openshift.io", "v1", "ImageStream");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "imagestreams");
    let mut streams = ImageStreams::new();
    for stream in names {
        let (namespace, name) = stream.split_once('/').unwrap_or_default();
        let scope = PermissionScope::Namespace(namespace.to_owned());
        let permission = cluster.shared.permission("get", &resource, scope, &["get"]);
        let api: Api<DynamicObject> = Api::namespaced_with(cluster.client(), namespace, &resource);
        let digests = match cluster.caller.call(&permission, || api.get(name)).await {
            Ok(object) => Ok(tag_digests(&object.data)),
            Err(ApiError::Gone) => Err(format!("the cluster has no ImageStream {stream}")),
            Err(ApiError::Forbidden(permission)) => {
                Err(format!("{}: {}", permission.sentence(), permission.remedy()))
            }
            Err(error) => return Err(error),
        };
        streams.insert(stream, digests);
    }
    Ok(streams)
}

/// Returns the digests of an ImageStream's tags. A digest in the specification, which the operators use, overrides the imported
/// digest of the same tag.
fn tag_digests(stream: &Value) -> BTreeMap<String, ImageDigest> {
    let list = |path: &str| stream.pointer(path).and_then(Value::as_array).into_iter().flatten();
    let text = |tag: &Value, path: &str| tag.pointer(path).and_then(Value::as_str).map(str::to_owned);
    let imported = list("/status/tags").map(|tag| (text(tag, "/tag"), text(tag, "/items/0/image")));
    let specified = list("/spec/tags").map(|tag| (text(tag, "/name"), text(tag, "/from/name")));
    let digest = |(tag, image): (Option<String>, Option<String>)| {
        Some((tag?, image?.rsplit('@').next()?.parse::<ImageDigest>().ok()?))
    };
    imported.chain(specified).filter_map(digest).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_digest_of_the_specification_overrides_the_imported_one() {
        let digest = |number: u8| format!("sha256:{number:064}");
        let stream = json!({
            "spec": {"tags": [
                {"name": "416.94.1-0", "from": {"kind": "DockerImage", "name": format!("quay.test/dev@{}", digest(1))}},
                {"name": "by-tag", "from": {"kind": "DockerImage", "name": "quay.test/dev:4.16"}},
                {"name": "both", "from": {"kind": "DockerImage", "name": format!("quay.test/dev@{}", digest(2))}},
                {"from": {"name": format!("quay.test/dev@{}", digest(3))}},
                {"name": "latest"},
                {"name": "hostile", "from": {"name": "quay.test/dev@sha256:../../x"}},
            ]},
            "status": {"tags": [
                {"tag": "by-tag", "items": [{"image": digest(4)}, {"image": digest(5)}]},
                {"tag": "both", "items": [{"image": digest(6)}]},
                {"tag": "empty", "items": []},
            ]},
        });
        let wanted = [("416.94.1-0", 1), ("both", 2), ("by-tag", 4)];
        let wanted = wanted.map(|(tag, number)| (tag.to_owned(), digest(number).parse().unwrap()));
        assert_eq!(tag_digests(&stream), BTreeMap::from(wanted));
        assert!(tag_digests(&json!({"spec": "no"})).is_empty());
    }
}
