"""Where the files of the official data sets are on the web, and their checksums; the only list of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class File:
    """One file to download: its name and its MD5."""

    name: str
    md5: str


@dataclasses.dataclass(frozen=True)
class Official:
    """An official data set: a line about it, the URL of the folder with its files, and the files.

    The checksums are those of torchvision (MNIST), of the data sets' own pages (Fashion-MNIST, CIFAR-10),
    of torchtext (WikiText-2) and, as there is no official one, of programs that use it (Tiny-ImageNet).
    """

    about: str
    url: str
    files: tuple


OFFICIAL = {
    "mnist": Official(
        "60,000 + 10,000 handwritten digits of 28x28 pixels, 10 classes",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            File("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            File("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            File("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion_mnist": Official(
        "60,000 + 10,000 images of clothes of 28x28 pixels, 10 classes",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            File("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            File("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            File("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            File("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "cifar10": Official(
        "50,000 + 10,000 colour photographs of 32x32 pixels, 10 classes",
        "https://www.cs.toronto.edu/~kriz/",
        (File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    "tiny_imagenet": Official(
        "100,000 + 10,000 colour photographs of 64x64 pixels, 200 classes (needs pillow)",
        "http://cs231n.stanford.edu/",
        (File("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
    ),
    "wikitext2": Official(
        "2,088,628 + 245,569 words of Wikipedia articles, for language modelling",
        "https://wikitext.smerity.com/",  # an author's own page; the original one, research.metamind.io, is closed
        (File("wikitext-2-v1.zip", "542ccefacc6c27f945fb54453812b3cd"),),
    ),
}
